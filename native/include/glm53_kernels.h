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
 * instruction sets differ by rounding.
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
    GLM53_BUSY = 8       /* the pool is running another job */
};

enum { GLM53_ISA_AUTO = 0, GLM53_ISA_SCALAR = 1, GLM53_ISA_AVX2 = 2, GLM53_ISA_AVX512 = 3 };

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
 * decoded once per call (once per wave of rows, should a call need more than 256 MiB of scratch). */
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
    float limit; /* swiglu_limit; 0 switches the clamps off */
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

/* y (rows, out) = x (rows, in) W^T. w: (out, in), float, or f16 if is_f16. out is any positive number. */
int32_t glm53_plain_linear(glm53_pool *pool, const void *w, int32_t is_f16, int32_t in_features,
                           int32_t out_features, const float *x, int32_t rows, float *y);

/* y = x / sqrt(mean(x^2) + eps) * weight, per row of (rows, width); weight (width) or NULL; y may be x. */
int32_t glm53_rms_norm(glm53_pool *pool, const float *x, const float *weight, int32_t rows, int32_t width,
                       float eps, float *y);

/* CDEF END */

#ifdef __cplusplus
}
#endif
#endif
