/* What the source files share: the table of one instruction set, the pool's job interface. Not installed. */
#ifndef GLM53_INTERNAL_H
#define GLM53_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "glm53_kernels.h"

enum {
    GLM53_PLAN_BYTES = 1024,
    GLM53_TILE = 16,       /* a packed tile is 16 x 16 weights */
    GLM53_AHEAD_TILES = 8, /* so many columns of tiles ahead a product prefetches its weights */
    GLM53_BLOCK = 128,     /* Hadamard width; unit of summation along k */
    GLM53_X_FLOATS = 128   /* floats of room for one prepared block of activations, in either precision */
};

/* One prepared block of activations in FAST16; the EXACT32 form is 128 floats in an order of the tier's
 * choice. */
typedef struct {
    int16_t q[GLM53_BLOCK];
    float slope;  /* what one unit of the integer sum is worth; NaN if an activation is not finite */
    float offset; /* contribution of the codebook's constant term */
} glm53_fast_block;

/* Scale of FAST16 activations. 128 * 1005 (largest byte sum) * 16383 < 2^31: no sum over a block can
 * overflow. */
#define GLM53_FAST_MAX 16383.0f
/* mul1: w = byte_sum * MUL1_SLOPE + MUL1_OFFSET, then rounded to f16. Both from f16 bits 0x1eee and 0xc931.
 */
#define GLM53_MUL1_SLOPE 0.00676727294921875f
#define GLM53_MUL1_OFFSET (-3.453125f)

/* A rectangle of a product: 128-blocks [block_begin, block_end) of k, tiles [tile_begin, tile_end) of n.
 * x: prepared blocks, block-major: block b of row r starts at float (b * rows + r) * GLM53_X_FLOATS.
 * acc: row r, column n (from tile_begin * 16) at r * acc_stride + n; overwritten. A multiple of
 * GLM53_AHEAD_TILES tiles wide, as matrices are. */
typedef struct glm53_rect {
    const glm53_matrix *matrix;
    const void *plan; /* the tier's, for the matrix's bits */
    const float *x;
    float *acc;
    size_t acc_stride;
    int32_t rows;
    int32_t block_begin, block_end;
    int32_t tile_begin, tile_end;
    const struct glm53_rect
        *next; /* NULL, or what the thread multiplies next: its first tiles are prefetched */
} glm53_rect;

typedef struct glm53_dense_kernels glm53_dense_kernels;

/* The kernels of one instruction set. They trust their arguments. */
typedef struct {
    int32_t isa;
    const glm53_dense_kernels *dense;
    bool (*has_fast16)(const glm53_matrix *matrix);
    /* w (128, out): rows [128 b, 128 b + 128) of the decoded weights. */
    void (*decode_block)(const glm53_matrix *matrix, int32_t b, float *w);
    /* y[128] = H x[128]; x and y may be the same. */
    void (*hadamard)(const float *x, float *y);
    /* Prepare x[128] * suh[128] through H, as the products of that precision want it. */
    void (*prepare)(const float *x, const uint16_t *suh, int32_t precision, float *block);
    /* What a product needs to know of a number of bits, in GLM53_PLAN_BYTES aligned to 64, or NULL if
     * nothing. Making it takes as long as two tiles. */
    void (*plan)(int32_t bits_x2, void *plan);
    /* acc = x W over a rectangle. */
    void (*multiply_exact)(const glm53_rect *rect);
    void (*multiply_fast)(const glm53_rect *rect);
    /* y[128] = (H sum_p parts[p * stride]) * svh + bias, parts added in order. */
    void (*finish)(const float *parts, int32_t num_parts, size_t stride, const uint16_t *svh,
                   const uint16_t *bias, float *y);
    /* a[128] = silu(gate) * up, clamped. */
    void (*activate)(const float *gate, const float *up, float limit, int32_t clamp, float *a);
    /* y[n] += scale * x[n]; n is a multiple of 8. */
    void (*add_scaled)(float *y, const float *x, float scale, int32_t n);
    /* weights = e^((logit - largest) * slope), 1 for the largest, within 2 units in the last place; 0 where
     * that is under `least`. Any n; sums: of each GLM53_WEIGHT_BLOCK weights. weights has room for whole
     * blocks, and gets zeros beyond n. The same bits in every instruction set. */
    void (*weigh)(const float *logits, int32_t n, double largest, double slope, double least, double *weights,
                  double *sums);
    /* x[n] = h[n] from f16; n is a multiple of 8. */
    void (*widen)(const uint16_t *h, int32_t n, float *x);
} glm53_tier;

extern const glm53_tier glm53_tier_scalar;
/* GLM53_PORTABLE leaves out what is not portable C, as a compiler for another machine does. */
#if defined(__x86_64__) && !defined(GLM53_PORTABLE)
#define GLM53_HAS_X86 1
extern const glm53_tier glm53_tier_avx2;
extern const glm53_tier glm53_tier_avx512;
/* gcc's header or clang's tells that the compiler and its assembler know AMX. Only Linux is asked for leave
 * to use it. */
#if defined(GLM53_AMX_EMULATED)
#define GLM53_HAS_AMX 1
#elif defined(__linux__) && defined(__has_include)
#if __has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>)
#define GLM53_HAS_AMX 1
#endif
#endif
#ifdef GLM53_HAS_AMX
extern const glm53_tier glm53_tier_amx;
#endif
#endif

/* NULL if the CPU or the build lacks it. */
const glm53_tier *glm53_find_tier(int32_t isa);

/* ---- pool ---- */

/* A job: every thread of the pool calls it once with its index. */
typedef void (*glm53_job_fn)(glm53_pool *pool, void *context, int32_t thread);

/* False if a job is running. Every public function that runs one acquires first and releases last. */
bool glm53_pool_acquire(glm53_pool *pool);
void glm53_pool_release(glm53_pool *pool);
/* work: about how many multiply-adds; a job too small to be worth waking the workers runs on the caller
 * alone, which changes no result. */
void glm53_pool_run(glm53_pool *pool, glm53_job_fn job, void *context, int64_t work);
/* Wake the workers and wait for them, so that they poll for the next job. */
void glm53_pool_rouse(glm53_pool *pool);
/* Within a job: wait until every thread has arrived, and start a new count of tasks. */
void glm53_pool_barrier(glm53_pool *pool);
/* Within a job: count one of something done, so that whoever awaits it sees what was written before. */
void glm53_pool_raise(glm53_pool *pool, atomic_int *count);
/* Within a job: wait until *count has reached `target`. */
void glm53_pool_await(glm53_pool *pool, atomic_int *count, int32_t target);
/* Within a job: the next task of the current count; each number is handed out once. */
int64_t glm53_pool_next(glm53_pool *pool);
const glm53_tier *glm53_pool_tier(const glm53_pool *pool);
/* The tier's plan for a valid number of bits. */
const void *glm53_pool_plan(const glm53_pool *pool, int32_t bits_x2);
int32_t glm53_pool_threads(const glm53_pool *pool);
/* The pool's scratch, at least `bytes`, 64-byte aligned, contents undefined; NULL without memory. Not within
 * a job. */
void *glm53_pool_scratch(glm53_pool *pool, size_t bytes);

/* ---- f16 ---- */

static inline float glm53_f32_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t glm53_bits_from_f32(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float glm53_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return glm53_f32_from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    /* Place the fields as if the exponent bias were equal, then scale by 2^112: right for subnormals, too. */
    float magnitude = glm53_f32_from_bits(rest << 13) * 0x1p112f;
    return glm53_f32_from_bits(sign | glm53_bits_from_f32(magnitude));
}

/* Round to 11 significant bits, ties to even: rounding to f16 for values within its normal range. */
static inline float glm53_round_to_f16(float f) {
    uint32_t bits = glm53_bits_from_f32(f);
    bits += 0xfffu + (bits >> 13 & 1u);
    return glm53_f32_from_bits(bits & ~0x1fffu);
}

static inline size_t glm53_tile_halves(const glm53_matrix *matrix) { return 8u * (size_t)matrix->bits_x2; }

#endif
