/* Portable kernels: plain loops in natural order, the oracle of the others. */
#include <math.h>

#include "dense.h"
#include "internal.h"
#include "weigh.h"

/* The 16-bit state of position t: the window of the tile's bit ring that ends where position t's bits end.
 * The ring is the tile's 32-bit words, most significant bit first. */
static uint32_t tile_state(const uint16_t *tile, int32_t bits_x2, int32_t t) {
    int32_t total = 128 * bits_x2;
    int32_t start = ((t + 1) * bits_x2 >> 1) - 16;
    if (start < 0) start += total;
    int32_t num_words = total / 32;
    int32_t first = start / 32;
    int32_t second = first + 1 == num_words ? 0 : first + 1;
    uint64_t window = (uint64_t)(tile[2 * first] | (uint32_t)tile[2 * first + 1] << 16) << 32 |
                      (tile[2 * second] | (uint32_t)tile[2 * second + 1] << 16);
    return (uint32_t)(window >> (48 - start % 32)) & 0xffffu;
}

static int32_t tile_row(int32_t t) { return (t / 8 % 4) * 2 + (t & 1) + 8 * (t >> 1 & 1); }

static int32_t tile_column(int32_t t) { return t / 32 + 8 * (t >> 2 & 1); }

static int32_t byte_sum(uint32_t state) {
    uint32_t x = state * 0x83dcd12du;
    return (int32_t)((x & 0xff) + (x >> 8 & 0xff) + (x >> 16 & 0xff) + (x >> 24));
}

static float codebook_value(uint32_t state, int32_t codebook) {
    if (codebook == GLM53_CODEBOOK_MUL1) {
        /* Both operations are exact in float32, so that the only rounding is the one to f16. */
        return glm53_round_to_f16((float)byte_sum(state) * GLM53_MUL1_SLOPE + GLM53_MUL1_OFFSET);
    }
    uint32_t x = codebook == GLM53_CODEBOOK_MCG ? state * 0xcbac1fedu : state * 89226354u + 64248484u;
    x = (x & 0x8fff8fffu) ^ 0x3b603b60u;
    return glm53_round_to_f16(glm53_f16_to_f32((uint16_t)x) + glm53_f16_to_f32((uint16_t)(x >> 16)));
}

static const uint16_t *tile_at(const glm53_matrix *matrix, int32_t kt, int32_t nt) {
    size_t index = (size_t)kt * (size_t)(matrix->out_features / GLM53_TILE) + (size_t)nt;
    return matrix->trellis + index * glm53_tile_halves(matrix);
}

static void decode_tile(const glm53_matrix *matrix, int32_t kt, int32_t nt, float *w, size_t stride) {
    const uint16_t *tile = tile_at(matrix, kt, nt);
    for (int32_t t = 0; t < 256; t++) {
        w[(size_t)tile_row(t) * stride + (size_t)tile_column(t)] =
            codebook_value(tile_state(tile, matrix->bits_x2, t), matrix->codebook);
    }
}

static void decode_block(const glm53_matrix *matrix, int32_t b, float *w) {
    size_t out = (size_t)matrix->out_features;
    for (int32_t i = 0; i < 8; i++) {
        for (int32_t nt = 0; nt < matrix->out_features / GLM53_TILE; nt++) {
            decode_tile(matrix, b * 8 + i, nt, w + (size_t)i * GLM53_TILE * out + (size_t)nt * GLM53_TILE,
                        out);
        }
    }
}

static void decode_tile_sums(const glm53_matrix *matrix, int32_t kt, int32_t nt, int16_t *sums) {
    const uint16_t *tile = tile_at(matrix, kt, nt);
    for (int32_t t = 0; t < 256; t++) {
        sums[tile_row(t) * GLM53_TILE + tile_column(t)] =
            (int16_t)byte_sum(tile_state(tile, matrix->bits_x2, t));
    }
}

static void hadamard(const float *x, float *y) {
    float a[GLM53_BLOCK];
    memcpy(a, x, sizeof a);
    for (int32_t width = 1; width < GLM53_BLOCK; width *= 2) {
        for (int32_t i = 0; i < GLM53_BLOCK; i++) {
            if (i & width) continue;
            float p = a[i], q = a[i + width];
            a[i] = p + q;
            a[i + width] = p - q;
        }
    }
    for (int32_t i = 0; i < GLM53_BLOCK; i++) y[i] = a[i] * 0.08838834764831845f; /* 1 / sqrt(128) */
}

static void quantise(const float *x, glm53_fast_block *block) {
    float largest = 0.0f, not_finite = 0.0f;
    for (int32_t i = 0; i < GLM53_BLOCK; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        not_finite += x[i] * 0.0f;
    }
    float inverse = largest > 0.0f && not_finite == 0.0f ? GLM53_FAST_MAX / largest : 0.0f;
    int32_t sum = 0;
    for (int32_t i = 0; i < GLM53_BLOCK; i++) {
        block->q[i] = inverse > 0.0f ? (int16_t)lrintf(x[i] * inverse) : 0;
        sum += block->q[i];
    }
    float scale = largest / GLM53_FAST_MAX;
    block->slope = scale * GLM53_MUL1_SLOPE + not_finite;
    block->offset = scale * GLM53_MUL1_OFFSET * (float)sum;
}

static void prepare(const float *x, const uint16_t *suh, int32_t precision, float *block) {
    float a[GLM53_BLOCK];
    for (int32_t i = 0; i < GLM53_BLOCK; i++) a[i] = x[i] * glm53_f16_to_f32(suh[i]);
    if (precision == GLM53_FAST16) {
        hadamard(a, a);
        quantise(a, (glm53_fast_block *)(void *)block);
    } else {
        hadamard(a, block);
    }
}

static void multiply_exact(const glm53_rect *rect) {
    float w[GLM53_BLOCK * GLM53_TILE];
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            for (int32_t i = 0; i < 8; i++) decode_tile(rect->matrix, b * 8 + i, nt, w + i * 256, GLM53_TILE);
            for (int32_t r = 0; r < rect->rows; r++) {
                const float *x = rect->x + ((size_t)b * (size_t)rect->rows + (size_t)r) * GLM53_X_FLOATS;
                float sum[GLM53_TILE] = {0};
                for (int32_t k = 0; k < GLM53_BLOCK; k++) {
                    for (int32_t n = 0; n < GLM53_TILE; n++) sum[n] += x[k] * w[k * GLM53_TILE + n];
                }
                float *acc =
                    rect->acc + (size_t)r * rect->acc_stride + (size_t)(nt - rect->tile_begin) * GLM53_TILE;
                for (int32_t n = 0; n < GLM53_TILE; n++) {
                    acc[n] = b == rect->block_begin ? sum[n] : acc[n] + sum[n];
                }
            }
        }
    }
}

static void multiply_fast(const glm53_rect *rect) {
    int16_t w[GLM53_BLOCK * GLM53_TILE];
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            for (int32_t i = 0; i < 8; i++) decode_tile_sums(rect->matrix, b * 8 + i, nt, w + i * 256);
            for (int32_t r = 0; r < rect->rows; r++) {
                const float *x = rect->x + ((size_t)b * (size_t)rect->rows + (size_t)r) * GLM53_X_FLOATS;
                const glm53_fast_block *block = (const glm53_fast_block *)(const void *)x;
                int32_t sum[GLM53_TILE] = {0};
                for (int32_t k = 0; k < GLM53_BLOCK; k++) {
                    for (int32_t n = 0; n < GLM53_TILE; n++) sum[n] += block->q[k] * w[k * GLM53_TILE + n];
                }
                float *acc =
                    rect->acc + (size_t)r * rect->acc_stride + (size_t)(nt - rect->tile_begin) * GLM53_TILE;
                for (int32_t n = 0; n < GLM53_TILE; n++) {
                    float part = fmaf((float)sum[n], block->slope, block->offset);
                    acc[n] = b == rect->block_begin ? part : acc[n] + part;
                }
            }
        }
    }
}

static void finish(const float *parts, int32_t num_parts, size_t stride, const uint16_t *svh,
                   const uint16_t *bias, float *y) {
    float a[GLM53_BLOCK];
    memcpy(a, parts, sizeof a);
    for (int32_t p = 1; p < num_parts; p++) {
        for (int32_t i = 0; i < GLM53_BLOCK; i++) a[i] += parts[(size_t)p * stride + (size_t)i];
    }
    hadamard(a, a);
    for (int32_t i = 0; i < GLM53_BLOCK; i++) {
        float value = a[i] * glm53_f16_to_f32(svh[i]);
        y[i] = bias ? value + glm53_f16_to_f32(bias[i]) : value;
    }
}

static float silu(float x) { return x / (1.0f + expf(-x)); }

static void activate(const float *gate, const float *up, float limit, int32_t clamp, float *a) {
    for (int32_t i = 0; i < GLM53_BLOCK; i++) {
        float g = gate[i], u = up[i];
        if (limit > 0.0f) {
            u = fminf(fmaxf(u, -limit), limit);
            g = clamp == GLM53_CLAMP_GATE ? silu(fminf(g, limit)) : fminf(silu(g), limit);
        } else {
            g = silu(g);
        }
        a[i] = g * u;
    }
}

static void add_scaled(float *y, const float *x, float scale, int32_t n) {
    for (int32_t i = 0; i < n; i++) y[i] += scale * x[i];
}

static void widen(const uint16_t *h, int32_t n, float *x) {
    for (int32_t i = 0; i < n; i++) x[i] = glm53_f16_to_f32(h[i]);
}

static bool has_fast16(const glm53_matrix *matrix) { return matrix->codebook == GLM53_CODEBOOK_MUL1; }

const glm53_tier glm53_tier_scalar = {
    .isa = GLM53_ISA_SCALAR,
    .weigh = glm53_weigh_scalar,
    .dense = &glm53_dense_scalar,
    .has_fast16 = has_fast16,
    .decode_block = decode_block,
    .hadamard = hadamard,
    .prepare = prepare,
    .multiply_exact = multiply_exact,
    .multiply_fast = multiply_fast,
    .finish = finish,
    .activate = activate,
    .add_scaled = add_scaled,
    .widen = widen,
};
