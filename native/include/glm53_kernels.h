/* glm53_kernels.h: the whole ABI of the native kernels.
 *
 * What it computes: products with EXL3-quantised matrices, decoded on the fly from the packed tiles as they
 * lie in a checkpoint (no repacked copy), the gated expert FFN built from them, and the hot float loops of
 * the CPU engine.
 *
 * Ownership. The library keeps nothing of what it is given: every pointer is borrowed for the call. Packed
 * weights, suh, svh and bias need 2-byte alignment only, so they may point into a memory-mapped file. Float
 * arrays need the natural alignment of float. Outputs must not overlap inputs unless a function says so.
 *
 * Threads. A pool owns its workers and its scratch memory and runs one job at a time: a second call while one
 * runs returns GLM53_BUSY and does nothing. Different pools are independent. The calling thread takes part in
 * the work, so num_threads = 1 starts no thread. A pool does not survive fork().
 *
 * Results. Every sum has one fixed order that depends on the shapes of the matrices and on the instruction
 * set alone:
 *   - the same call gives the same bits each time, for any number of threads;
 *   - a row's result does not depend on the other rows of the call, on how many there are, or on where its
 * picks stand; the picks of one row are summed in the order in which that row lists them. Different
 * instruction sets differ by rounding, except that AVX2, AVX512 and AMX give the same bits in FAST16.
 *
 * Arrays are dense, C order. "f16" is the IEEE binary16 bit pattern in a uint16_t.
 */
#ifndef GLM53_KERNELS_H
#define GLM53_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The text between the two markers is the cffi cdef: plain declarations only. */
/* CDEF BEGIN */

enum {
    GLM53_OK = 0,
    GLM53_BAD_ARGUMENT = 1, /* null pointer, row count or enum out of range */
    GLM53_BAD_SHAPE = 2,    /* features not a positive multiple of 128, or shapes that do not fit together */
    GLM53_BAD_CODEBOOK = 3, /* unknown codebook, or bits that the codebook does not have */
    GLM53_BAD_PICK = 4,     /* a pick is neither -1 nor an expert of the table */
    GLM53_NO_MEMORY = 5,
    GLM53_NO_THREAD = 6, /* a worker thread could not be started */
    GLM53_NO_ISA = 7,    /* this CPU or this build lacks the instruction set */
    GLM53_BUSY = 8,      /* the pool is running another job */
    GLM53_STALLED = 9,   /* the crew did not answer within its deadline; it must be destroyed */
    GLM53_FULL = 10      /* the mailbox has no free cell */
};

/* AVX2: with FMA and F16C. AVX512: those, and AVX-512 F, BW, VBMI and VNNI. AMX: those, and tiles of INT8,
 * which Linux must grant; being asked whether there is AMX (AUTO asks, too) makes the library request it for
 * the process. */
enum {
    GLM53_ISA_AUTO = 0,
    GLM53_ISA_SCALAR = 1,
    GLM53_ISA_AVX2 = 2,
    GLM53_ISA_AVX512 = 3,
    GLM53_ISA_AMX = 4
};

enum { GLM53_CODEBOOK_DEFAULT = 0, GLM53_CODEBOOK_MCG = 1, GLM53_CODEBOOK_MUL1 = 2 };

/* EXACT32: float32 weights equal to the f16 codebook values bit for bit, float32 activations and sums.
 * FAST16: codebook mul1 only. Activations rounded to 15 bits and a sign with one scale per 128 channels,
 * exact integer sums per 128 channels, weights by the codebook's affine rule without its last rounding to
 * f16. Relative RMS error against exact arithmetic about 2.2e-4 for one product and 3.8e-4 for a gated
 * expert. */
enum { GLM53_EXACT32 = 0, GLM53_FAST16 = 1 };

/* How swiglu_limit > 0 clamps the gate g (up is always clamped to +-limit):
 * GATE: silu(min(g, limit)), the model's definition. ACTIVATION: min(silu(g), limit), as the GPU kernels do.
 */
enum { GLM53_CLAMP_GATE = 0, GLM53_CLAMP_ACTIVATION = 1 };

typedef struct glm53_pool glm53_pool;

typedef struct {
    int32_t num_threads; /* >= 1, the calling thread included */
    int32_t isa;         /* GLM53_ISA_AUTO takes the best one there is */
    const int32_t *cpus; /* NULL, or num_cpus logical CPUs; worker i (1..) is pinned to cpus[i % num_cpus]; */
    int32_t num_cpus;    /* the calling thread is never pinned */
    int32_t spin_us;     /* how long an idle worker polls before it sleeps; 0 takes about 20. Who waits within
                            a job polls as long, at most 200 */
} glm53_pool_config;

typedef struct {
    int32_t num_threads;
    int32_t isa;
    int32_t num_pinned;    /* workers whose affinity could be set */
    int64_t scratch_bytes; /* grows to the largest job and stays */
} glm53_pool_info;

/* One quantised matrix W (in, out), y = x W. trellis: (in/16, out/16, 8 * bits_x2) packed tiles.
 * bits_x2: twice the bits per weight, 2, 4, ... 16; also 3, 5, 7 for mul1. */
typedef struct {
    const uint16_t *trellis;
    const uint16_t *suh;  /* f16 (in) */
    const uint16_t *svh;  /* f16 (out) */
    const uint16_t *bias; /* f16 (out) or NULL */
    int32_t in_features;
    int32_t out_features;
    int32_t bits_x2;
    int32_t codebook;
} glm53_matrix;

typedef struct {
    glm53_matrix gate; /* (hidden, intermediate) */
    glm53_matrix up;   /* (hidden, intermediate) */
    glm53_matrix down; /* (intermediate, hidden) */
} glm53_expert;

/* y[r] = sum over i < num_picks, in that order, of weights[r, i] * expert picks[r, i] (x[r]).
 * A pick of -1 is skipped; a row without picks gives zeros. An expert that is picked by several rows is
 * decoded once per call (once per wave of rows, should a call need more than 256 MiB of scratch).
 *
 * One expert may be computed in part: with part_end > 0, of expert part_expert only the neurons of the
 * intermediate's 128-blocks [part_begin, part_end), for up to 8 rows; the bias of down counts with block 0.
 * The results of parts that make up all blocks add up to the whole expert's, but for rounding; one part of
 * all blocks gives its very bits. */
typedef struct {
    const glm53_expert *table; /* (num_experts), all of one shape */
    const float *x;            /* (rows, hidden) */
    const int32_t *picks;      /* (rows, num_picks) */
    const float *weights;      /* (rows, num_picks) */
    float *y;                  /* (rows, hidden) */
    int32_t num_experts;
    int32_t rows;
    int32_t num_picks;
    int32_t clamp;
    int32_t precision;
    float limit;                               /* swiglu_limit; 0 switches the clamps off */
    int32_t part_expert, part_begin, part_end; /* part_end = 0: every expert is whole */
} glm53_expert_job;

/* One line of English for a status; never NULL. */
const char *glm53_status_text(int32_t status);

/* Bit i is set if this CPU and this build can run instruction set i. */
uint32_t glm53_isa_mask(void);

/* Create a pool in *pool. On failure *pool is NULL. Failing to pin a worker is no error: see num_pinned. */
int32_t glm53_pool_create(const glm53_pool_config *config, glm53_pool **pool);

/* Stop the workers and free the pool; NULL is ignored. No job may be running. */
void glm53_pool_destroy(glm53_pool *pool);

int32_t glm53_pool_describe(const glm53_pool *pool, glm53_pool_info *info);

/* GLM53_OK if the fields of a matrix fit together. */
int32_t glm53_matrix_check(const glm53_matrix *matrix);

/* The precision that a product really runs in: FAST16 falls back to EXACT32 where it is not implemented. */
int32_t glm53_effective_precision(const glm53_pool *pool, const glm53_matrix *matrix, int32_t precision);

/* w (in, out): the weights in the rotated basis, exact (f16 values as float32). */
int32_t glm53_decode(glm53_pool *pool, const glm53_matrix *matrix, float *w);

/* y (rows, width): orthonormal 128-point Hadamard transform of each run of 128 columns. width: multiple of
 * 128. */
int32_t glm53_hadamard(glm53_pool *pool, const float *x, int32_t rows, int32_t width, float *y);

/* y (rows, out) = x (rows, in) W, with both Hadamard transforms, suh, svh and bias. */
int32_t glm53_linear(glm53_pool *pool, const glm53_matrix *matrix, const float *x, int32_t rows,
                     int32_t precision, float *y);

int32_t glm53_experts(glm53_pool *pool, const glm53_expert_job *job);

/* ---- the CPU engine's other hot loops; all float32, widths are multiples of 8 ---- */

/* One hyper-connection site before its block, for `rows` tokens of four streams (see the model's formula):
 *   m = fn v, v = flatten(x) / sqrt(mean(v^2) + norm_eps);  pre, post, comb from m * scale + base, comb made
 * doubly stochastic by sinkhorn_iters rounds of rows and columns;  u = sum_i pre[i] x[i]. */
typedef struct {
    const float *x;     /* (rows, 4, hidden) */
    const float *fn;    /* (24, 4 * hidden): 4 rows for pre, 4 for post, 16 for comb */
    const float *base;  /* (24) */
    const float *scale; /* (3): pre, post, comb */
    float *u;           /* (rows, hidden) */
    float *post;        /* (rows, 4) */
    float *comb;        /* (rows, 4, 4) */
    int32_t rows;
    int32_t hidden;
    int32_t sinkhorn_iters; /* >= 1 */
    float norm_eps;
    float eps; /* added to pre, and to every sum that Sinkhorn's rounds divide by */
} glm53_mhc_job;

int32_t glm53_mhc_site(glm53_pool *pool, const glm53_mhc_job *job);

/* out[r, j] = post[r, j] y[r] + sum_i comb[r, i, j] x[r, i]. x, out (rows, 4, hidden); out may be x. */
int32_t glm53_mhc_apply(glm53_pool *pool, const float *x, const float *y, const float *post,
                        const float *comb, int32_t rows, int32_t hidden, float *out);

/* The gated delta rule for `tokens` tokens of each of `num_sequences` sequences. Per token and head, S (128
 * key, 128 value): S = diag(exp g) S; delta = beta (v - S^T k); S += k delta^T; o = S^T q. Many tokens in one
 * call and one call per token give the same bits. */
typedef struct {
    float *const *states; /* (num_sequences) pointers to (heads, 128, 128), updated in place */
    const float *q;       /* (num_sequences, tokens, heads, 128), normalised and scaled */
    const float *k;       /* likewise, normalised */
    const float *v;       /* likewise */
    const float *g;       /* likewise, log decay, <= 0 */
    const float *beta;    /* (num_sequences, tokens, heads) */
    float *o;             /* (num_sequences, tokens, heads, 128) */
    int32_t num_sequences;
    int32_t tokens;
    int32_t heads;
} glm53_kda_job;

int32_t glm53_kda(glm53_pool *pool, const glm53_kda_job *job);

/* Causal depthwise convolution of 4 taps, then silu, for `tokens` tokens of each sequence. A state holds the
 * three columns before the first token, oldest first, zeros at the start of a sequence; it is updated in
 * place. Bits as above. */
typedef struct {
    float *const *states; /* (num_sequences) pointers to (3, channels) */
    const float *x;       /* (num_sequences, tokens, channels) */
    const float *weight;  /* (4, channels), oldest tap first */
    float *y;             /* (num_sequences, tokens, channels) */
    int32_t num_sequences;
    int32_t tokens;
    int32_t channels;
} glm53_conv_job;

int32_t glm53_conv(glm53_pool *pool, const glm53_conv_job *job);

/* Latent attention of `rows` consecutive tokens of one sequence over its cached rows, key and value of every
 * head. Row r sees t = position + r + 1 tokens. Without an indexer (index_queries NULL), or with at most
 * topk_pools complete pools of kpool tokens, it reads all; else the topk_pools best complete pools, of equals
 * the first, and the tokens after the last complete pool, where
 *   score[p] = sum_i index_weights[r, i] max(0, index_scale * index_queries[r, i] . pooled[p]).
 * y[r, h] = sum_j softmax_j(scale * queries[r, h] . latent[j]) latent[j]. A row's bits depend on that row and
 * its tokens alone. latent, index_dim: multiples of 8, at most 1,024. page_tokens: a multiple of kpool. */
typedef struct {
    const float *queries;                       /* (rows, heads, latent) */
    const float *latents;                       /* (pages, page_tokens, latent) */
    const float *index_queries, *index_weights; /* (rows, index_heads, index_dim), (rows, index_heads) */
    const float *pooled;                        /* (pages, page_tokens / kpool, index_dim) */
    const int64_t *page_ids;                    /* the sequence's, for position + rows tokens */
    float *y;                                   /* (rows, heads, latent) */
    int32_t rows, position, heads, latent, page_tokens, kpool, topk_pools, index_heads, index_dim;
    float scale, index_scale;
} glm53_latent_job;

int32_t glm53_latent_attention(glm53_pool *pool, const glm53_latent_job *job);

/* y (rows, out) = x (rows, in) W^T. w: (out, in), float, or f16 if is_f16. out is any positive number. */
int32_t glm53_plain_linear(glm53_pool *pool, const void *w, int32_t is_f16, int32_t in_features,
                           int32_t out_features, const float *x, int32_t rows, float *y);

/* y = x / sqrt(mean(x^2) + eps) * weight, per row of (rows, width); weight (width) or NULL; y may be x. */
int32_t glm53_rms_norm(glm53_pool *pool, const float *x, const float *weight, int32_t rows, int32_t width,
                       float eps, float *y);

/* ---- drawing a token ----
 *
 * A sampler owns scratch memory for rows of up to max_ids logits, runs on the calling thread and is used by
 * one thread at a time. Logits hold no NaN and no plus infinity; `largest` is their maximum, and finite. Ids
 * are ranked by (logit descending, id ascending). Results are the same bits in every instruction set. */

typedef struct glm53_sampler glm53_sampler;

/* In this order: scale, keep the first top_k of the ranking, of those the shortest prefix that holds top_p of
 * the weight, of those the weights of at least min_p times the largest. weight = e^((logit - largest) /
 * temperature), in double precision; one under 2^-1021 is 0. */
typedef struct {
    double temperature; /* > 0 */
    double top_p;       /* 0 .. 1; 1 is off */
    double min_p;       /* 0 .. 1; 0 is off */
    int32_t top_k;      /* >= 0; 0 is off */
} glm53_filters;

/* Create a sampler in *sampler; NULL on failure. isa: GLM53_ISA_AUTO takes the best one there is. */
int32_t glm53_sampler_create(int32_t max_ids, int32_t isa, glm53_sampler **sampler);

/* Free the sampler; NULL is ignored. */
void glm53_sampler_destroy(glm53_sampler *sampler);

/* The id whose share of the kept weights, cumulated by ascending id, holds u (0 <= u < 1). */
int32_t glm53_sampler_draw(glm53_sampler *sampler, const float *logits, int32_t num_ids, float largest,
                           const glm53_filters *filters, double u, int32_t *id);

/* total = sum of e^(logit - largest) over num_ids logits. */
int32_t glm53_sampler_total(glm53_sampler *sampler, const float *logits, int32_t num_ids, float largest,
                            double *total);

/* ids (count): the first `count` of the ranking, by ascending id. 1 <= count <= num_ids. */
int32_t glm53_sampler_top(glm53_sampler *sampler, const float *logits, int32_t num_ids, int32_t count,
                          int32_t *ids);

/* ---- memory for the experts and the mailbox ---- */

enum { GLM53_PAGES_PLAIN = 0, GLM53_PAGES_TRANSPARENT = 1, GLM53_PAGES_HUGE = 2 };

/* Zeroed private memory of this process. */
typedef struct {
    void *base;           /* aligned to 2 MiB */
    int64_t num_bytes;    /* as asked for */
    int64_t mapped_bytes; /* rounded up to whole pages */
    int32_t pages;        /* the kind that the kernel granted; TRANSPARENT is a wish that it may not fulfil */
    int32_t refusal;      /* errno of the last kind that was refused on the way, or 0 */
} glm53_region;

/* Map memory in the best kind of pages up to `pages` that can be had. GLM53_NO_MEMORY if there is none. */
int32_t glm53_region_map(int64_t num_bytes, int32_t pages, glm53_region *region);

/* Lock the region into memory; *error is errno on failure (GLM53_NO_MEMORY). */
int32_t glm53_region_lock(const glm53_region *region, int32_t *error);

/* Unmap, which also unlocks; the region is empty afterwards, and an empty region is ignored. */
void glm53_region_unmap(glm53_region *region);

/* ---- the mailbox: jobs for CPU experts in memory that a GPU can write ----
 *
 * One producer posts jobs numbered first_seq, first_seq + 1, ... (32 bits, wrapping); job seq lies in cell
 * seq % num_cells. There are no locks: a job belongs to the producer until `posted` holds its number and
 * from then on to the crew, until `done` holds it. Both words are written last, with release order, and read
 * with acquire order; everything else in a cell is plain memory.
 *
 *   producer                                       crew
 *   wait until done == seq - num_cells             wait until posted == seq
 *   write job, picks, weights, x                   read them, write y and the answer's other words
 *   posted = seq                                   done = seq
 *   wait until done == seq, read y
 *
 * Every number is answered, also a job without picks (rows = 0, or every pick -1), in order. A stream of a
 * GPU can wait for `done` with a cyclic greater-or-equal comparison.
 *
 * Bytes, little-endian. The header:
 *
 *     0  u32 magic 0x4d333547 ("G53M")     16  u32 max_picks, per row
 *     4  u32 version, 2                    20  u32 hidden
 *     8  u32 num_cells                     24  u32 first_seq
 *    12  u32 max_rows                      28  u32 cell_bytes         32 .. 255 zero
 *
 * Cell i starts at 256 + i * cell_bytes, a multiple of 256:
 *
 *     0  u32 posted                        producer; alone in its cache line
 *    64  u32 done                          crew; line of the answer
 *    68  i32 status                        crew: GLM53_OK or what was wrong with the job
 *    72  i32 num_experts                   crew: distinct experts computed
 *    76  u32 elapsed_ns                    crew: time of the computation, at most 2^32 - 1
 *    80  i32 num_blocks                    crew: 128-blocks of the intermediate computed, over all experts
 *   128  i32 layer                         producer: sparse layer, the row of the crew's table
 *   132  i32 rows                          0 .. max_rows
 *   136  i32 num_picks                     per row, 1 .. max_picks
 *   140  i32 x_kind                        0: x is float32, 1: x is f16
 *   144  i32 part_expert                   the expert of which only the first part_blocks are computed
 *   148  i32 part_blocks                   128-blocks of its intermediate; 0: every expert is whole
 *   256  i32 picks (rows, num_picks)       expert within the layer, or -1
 *     .  f32 weights (rows, num_picks)     at weights_offset
 *     .  x (rows, hidden)                  at x_offset; room for max_rows of float32
 *     .  f32 y (rows, hidden)              at y_offset; row r = sum over i of weights[r, i] * expert(x[r])
 */
enum {
    GLM53_MAIL_HEADER_BYTES = 256,
    GLM53_MAIL_POSTED = 0,
    GLM53_MAIL_DONE = 64,
    GLM53_MAIL_STATUS = 68,
    GLM53_MAIL_NUM_EXPERTS = 72,
    GLM53_MAIL_ELAPSED_NS = 76,
    GLM53_MAIL_NUM_BLOCKS = 80,
    GLM53_MAIL_LAYER = 128,
    GLM53_MAIL_ROWS = 132,
    GLM53_MAIL_NUM_PICKS = 136,
    GLM53_MAIL_X_KIND = 140,
    GLM53_MAIL_PART_EXPERT = 144,
    GLM53_MAIL_PART_BLOCKS = 148,
    GLM53_MAIL_PICKS = 256
};

enum { GLM53_X_F32 = 0, GLM53_X_F16 = 1 };

typedef struct {
    int32_t num_cells; /* a power of two, 2 .. 4096 */
    int32_t max_rows;  /* 1 .. 8: up to so many rows the bits of one do not depend on the others */
    int32_t max_picks; /* per row, 1 .. 64 */
    int32_t hidden;    /* a positive multiple of 128 */
    uint32_t first_seq;
} glm53_mailbox_shape;

typedef struct {
    int64_t total_bytes, cell_bytes;
    int64_t weights_offset, x_offset, y_offset; /* within a cell */
} glm53_mailbox_layout;

/* GLM53_BAD_ARGUMENT for an impossible shape. */
int32_t glm53_mailbox_measure(const glm53_mailbox_shape *shape, glm53_mailbox_layout *layout);

/* Write header and empty cells into total_bytes of memory, aligned to 256. */
int32_t glm53_mailbox_init(void *memory, const glm53_mailbox_shape *shape);

/* ---- the crew: threads that answer a mailbox ----
 *
 * A lead thread polls the mailbox and computes each job with a pool of its own, in which it is thread 0. Idle
 * for poll_us it parks, and the pool with it; the doorbell wakes it. While it is awake nothing on the path
 * from posted to done calls the system. A parked lead still looks at the mailbox ten times a second, so a
 * missed doorbell costs time and loses nothing.
 *
 * A watchdog thread fails the crew when the oldest job has waited for deadline_ms: it then answers every
 * posted job, now and later, with status GLM53_STALLED, so that nobody waits for ever. A failed crew computes
 * nothing more. Memory: the mailbox and everything the table points to must outlive the crew.
 *
 * An errand is a job of any number of rows whose arrays stay where they are, for a host that has work for the
 * same threads between two steps: another pool on their CPUs would run beside polling ones. The lead does it
 * when no mail is waiting, and looks at no mail meanwhile. The watchdog gives it ten times deadline_ms.
 *
 * Threads: post, next_seq, wait, begin and finish belong to the producer's thread; the others may be called
 * from any. */
typedef struct glm53_crew glm53_crew;

typedef int32_t (*glm53_compute_fn)(void *context, const glm53_expert_job *job);

typedef struct {
    void *mailbox;             /* initialised */
    const glm53_expert *table; /* (num_layers, num_experts), borrowed */
    int32_t num_layers;
    int32_t num_experts;
    int32_t precision;
    int32_t clamp;
    float limit;
    int32_t isa;
    int32_t num_threads; /* >= 1, the lead included */
    const int32_t *cpus; /* NULL, or num_cpus logical CPUs; thread i is pinned to cpus[i % num_cpus] */
    int32_t num_cpus;
    int32_t poll_us;          /* >= 0 */
    int32_t deadline_ms;      /* >= 1 */
    glm53_compute_fn compute; /* NULL computes with glm53_experts; tests put a fault here */
    void *context;
} glm53_crew_config;

typedef struct {
    int64_t num_jobs;    /* answered by the lead */
    int64_t num_empty;   /* of those, jobs without a pick */
    int64_t num_picks;   /* row-expert pairs computed */
    int64_t num_experts; /* distinct experts, summed over jobs */
    int64_t num_blocks;  /* 128-blocks of their intermediates that were computed */
    int64_t busy_ns;     /* computing */
    int64_t num_parks;
    int32_t num_pinned;
    int32_t is_failed;
} glm53_crew_stats;

/* What a producer on the host posts: a job with float32 rows. */
typedef struct {
    const float *x;       /* (rows, hidden) */
    const int32_t *picks; /* (rows, num_picks) */
    const float *weights; /* (rows, num_picks) */
    int32_t layer;
    int32_t rows;
    int32_t num_picks;
    int32_t part_expert, part_blocks; /* as in the cell */
} glm53_mail;

int32_t glm53_crew_create(const glm53_crew_config *config, glm53_crew **crew);

/* Stop and free the crew; NULL is ignored. GLM53_STALLED if a thread did not end within deadline_ms: then
 * crew, mailbox and table stay in use for as long as the process lives. */
int32_t glm53_crew_destroy(glm53_crew *crew);

/* Wake a parked lead: before a step whose jobs a GPU posts. */
void glm53_crew_ring(glm53_crew *crew);

/* Copy a job into its cell, post it and ring. *seq is its number. GLM53_FULL if its cell is still in use. */
int32_t glm53_crew_post(glm53_crew *crew, const glm53_mail *mail, uint32_t *seq);

/* Wait for `done` of a posted job; gives its status. GLM53_STALLED when the crew failed, or did not answer
 * within timeout_ms. */
int32_t glm53_crew_wait(glm53_crew *crew, uint32_t seq, int32_t timeout_ms);

/* Hand an errand to the crew: x, picks, weights, y, rows and num_picks of the job, whose arrays must stay
 * until finish has given another status than GLM53_STALLED; the rest is the crew's, with the experts of this
 * layer. GLM53_BUSY if one was begun and not finished. */
int32_t glm53_crew_begin(glm53_crew *crew, int32_t layer, const glm53_expert_job *job);

/* Wait for the errand; gives its status, and in *elapsed_ns, if that is no NULL, the time of its computation.
 * GLM53_STALLED when the crew failed; GLM53_BAD_ARGUMENT without an errand. */
int32_t glm53_crew_finish(glm53_crew *crew, int64_t *elapsed_ns);

/* GLM53_OK, GLM53_STALLED for a failed crew, or the first status that was not GLM53_OK. */
int32_t glm53_crew_check(const glm53_crew *crew);

int32_t glm53_crew_describe(const glm53_crew *crew, glm53_crew_stats *stats);

/* ---- the courier: a thread that gives a GPU's copy engine its orders ----
 *
 * A kernel knows what is to be copied out of host memory, and only the host can have the copy engine do it.
 * So the kernel writes an order into a ring, and the courier enqueues its copies on a stream of its own, and
 * behind them a write of the order's number to a word on the device, which other kernels wait for.
 *
 * Ring: num_cells cells of 128 bytes, aligned to 128, the order s in cell s mod num_cells. At a cell's
 *     0  u32 posted       written last, with release order
 *     4  u32 num_copies   0 .. GLM53_MOST_COPIES; with 0 the number alone is written
 *     8  u64 sources[GLM53_MOST_COPIES], addresses in host memory
 *    40  u64 targets[GLM53_MOST_COPIES], addresses on the device
 * Cells must not be posted again before their order's number was seen on the device.
 *
 * Idle for poll_us the courier parks; the doorbell wakes it, and a parked one looks ten times a second. After
 * an error of the driver it does nothing more, so whoever waits on the device needs a limit of its own.
 * Memory: the ring must outlive the courier. */
enum { GLM53_MOST_COPIES = 4, GLM53_COURIER_CELL_BYTES = 128 };

typedef struct glm53_courier glm53_courier;

/* The driver's calls, by cuda.h: cuCtxSetCurrent, cuMemcpyHtoDAsync, cuStreamWriteValue32. 0 is success. */
typedef int32_t (*glm53_enter_fn)(void *context);
typedef int32_t (*glm53_copy_fn)(uint64_t target, const void *source, size_t num_bytes, void *stream);
typedef int32_t (*glm53_mark_fn)(void *stream, uint64_t address, uint32_t value, uint32_t flags);

typedef struct {
    void *ring;
    int32_t num_cells; /* a power of two, 2 .. 4096 */
    uint32_t first_seq;
    int64_t record_bytes; /* of each copy */
    glm53_enter_fn enter;
    glm53_copy_fn copy;
    glm53_mark_fn mark;
    void *context;
    void *stream;
    uint64_t arrived; /* address of the word on the device */
    int32_t poll_us;  /* >= 0 */
} glm53_courier_config;

typedef struct {
    int64_t num_orders, num_copies, num_parks;
    int32_t error; /* the driver's first, or 0 */
} glm53_courier_stats;

/* Write empty cells: as if the lap before the first had been posted. */
int32_t glm53_courier_init(void *ring, int32_t num_cells, uint32_t first_seq);

int32_t glm53_courier_create(const glm53_courier_config *config, glm53_courier **courier);

/* Stop and free it, when the call of the driver that it is in returns; NULL is ignored. */
void glm53_courier_destroy(glm53_courier *courier);

/* Wake a parked courier: before a step whose orders a GPU posts. */
void glm53_courier_ring(glm53_courier *courier);

int32_t glm53_courier_describe(const glm53_courier *courier, glm53_courier_stats *stats);

/* CDEF END */

#ifdef __cplusplus
}
#endif
#endif
