/* AVX2: what stands around a product, and the table of this instruction set. */
#include "exl3_avx2.h"

#include "weigh.h"

#ifdef GLM53_HAS_X86
#include "avx2_begin.h"
#include "avx2_math.h"

bool glm53_avx2_has_fast16(const glm53_matrix *matrix) { return matrix->codebook == GLM53_CODEBOOK_MUL1; }

enum { VECTORS = GLM53_BLOCK / 8 };

INLINE void transform(__m256 v[VECTORS]) {
    const __m256 sign4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    const __m256 sign2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 sign1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 scale = _mm256_set1_ps(0.08838834764831845f); /* 1 / sqrt(128) */
    for (int32_t i = 0; i < VECTORS; i++) {
        __m256 a = v[i];
        a = _mm256_fmadd_ps(a, sign1, _mm256_permute_ps(a, 0xb1));
        a = _mm256_fmadd_ps(a, sign2, _mm256_permute_ps(a, 0x4e));
        v[i] = _mm256_fmadd_ps(a, sign4, _mm256_permute2f128_ps(a, a, 1));
    }
    for (int32_t width = 1; width < VECTORS; width *= 2) {
        for (int32_t i = 0; i < VECTORS; i++) {
            if (i & width) continue;
            __m256 p = v[i], q = v[i + width];
            v[i] = _mm256_add_ps(p, q);
            v[i + width] = _mm256_sub_ps(p, q);
        }
    }
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_mul_ps(v[i], scale);
}

void glm53_avx2_hadamard(const float *x, float *y) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_loadu_ps(x + 8 * i);
    transform(v);
    for (int32_t i = 0; i < VECTORS; i++) _mm256_storeu_ps(y + 8 * i, v[i]);
}

/* In which order the products want their activations; a compile-time argument. */
typedef enum { FOR_AVX2, FOR_AVX512 } row_order;

/* Rows 0..7 of a tile as the quads (0, 2, 4, 6), (1, 3, 5, 7). */
INLINE __m256 even_odd(__m256 v) {
    return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

/* Two registers of a k-tile's rows, to 16 bits. */
INLINE __m256i pack_rows(__m256i low, __m256i high, row_order order) {
    if (order == FOR_AVX512) return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

INLINE void quantise(const __m256 v[VECTORS], glm53_fast_block *block, row_order order) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 largest = _mm256_setzero_ps(), poison = _mm256_setzero_ps();
    for (int32_t i = 0; i < VECTORS; i++) {
        largest = _mm256_max_ps(largest, _mm256_and_ps(v[i], no_sign));
        poison = _mm256_fmadd_ps(v[i], _mm256_setzero_ps(), poison);
    }
    float lanes[8], poisons[8], max = 0.0f, not_finite = 0.0f;
    _mm256_storeu_ps(lanes, largest);
    _mm256_storeu_ps(poisons, poison);
    for (int32_t i = 0; i < 8; i++) {
        max = lanes[i] > max ? lanes[i] : max;
        not_finite += poisons[i];
    }
    const __m256 inverse = _mm256_set1_ps(max > 0.0f ? GLM53_FAST_MAX / max : 0.0f);
    __m256i sum = _mm256_setzero_si256();
    for (int32_t i = 0; i < VECTORS; i += 2) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], inverse));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        _mm256_storeu_si256((__m256i *)(void *)(block->q + 8 * i), pack_rows(a, b, order));
    }
    int32_t parts[8], total = 0;
    _mm256_storeu_si256((__m256i *)(void *)parts, sum);
    for (int32_t i = 0; i < 8; i++) total += parts[i];
    float scale = max / GLM53_FAST_MAX;
    block->slope = scale * GLM53_MUL1_SLOPE + not_finite;
    block->offset = scale * GLM53_MUL1_OFFSET * (float)total;
}

INLINE void prepare_in_order(const float *x, const uint16_t *suh, int32_t precision, float *block,
                             row_order order) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) {
        v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), load_f16(suh + 8 * i));
    }
    transform(v);
    if (precision == GLM53_FAST16) {
        quantise(v, (glm53_fast_block *)(void *)block, order);
    } else {
        for (int32_t i = 0; i < VECTORS; i++) {
            _mm256_storeu_ps(block + 8 * i, order == FOR_AVX2 ? even_odd(v[i]) : v[i]);
        }
    }
}

static void prepare(const float *x, const uint16_t *suh, int32_t precision, float *block) {
    prepare_in_order(x, suh, precision, block, FOR_AVX2);
}

void glm53_avx2_prepare_for_avx512(const float *x, const uint16_t *suh, int32_t precision, float *block) {
    prepare_in_order(x, suh, precision, block, FOR_AVX512);
}

void glm53_avx2_finish(const float *parts, int32_t num_parts, size_t stride, const uint16_t *svh,
                       const uint16_t *bias, float *y) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_loadu_ps(parts + 8 * i);
    for (int32_t p = 1; p < num_parts; p++) {
        const float *part = parts + (size_t)p * stride;
        for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_add_ps(v[i], _mm256_loadu_ps(part + 8 * i));
    }
    transform(v);
    for (int32_t i = 0; i < VECTORS; i++) {
        __m256 scaled = _mm256_mul_ps(v[i], load_f16(svh + 8 * i));
        if (bias) scaled = _mm256_add_ps(scaled, load_f16(bias + 8 * i));
        _mm256_storeu_ps(y + 8 * i, scaled);
    }
}

void glm53_avx2_activate(const float *gate, const float *up, float limit, int32_t clamp, float *a) {
    const __m256 top = _mm256_set1_ps(limit), bottom = _mm256_set1_ps(-limit);
    for (int32_t i = 0; i < GLM53_BLOCK; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i), u = _mm256_loadu_ps(up + i);
        if (limit > 0.0f) u = _mm256_min_ps(top, _mm256_max_ps(bottom, u));
        if (limit > 0.0f && clamp == GLM53_CLAMP_GATE) g = _mm256_min_ps(top, g);
        g = silu_ps(g);
        if (limit > 0.0f && clamp == GLM53_CLAMP_ACTIVATION) g = _mm256_min_ps(top, g);
        _mm256_storeu_ps(a + i, _mm256_mul_ps(g, u));
    }
}

void glm53_avx2_add_scaled(float *y, const float *x, float scale, int32_t n) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (int32_t i = 0; i < n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(_mm256_loadu_ps(x + i), factor, _mm256_loadu_ps(y + i)));
    }
}

void glm53_avx2_widen(const uint16_t *h, int32_t n, float *x) {
    for (int32_t i = 0; i < n; i += 8) _mm256_storeu_ps(x + i, load_f16(h + i));
}

#include "target_end.h"

const glm53_tier glm53_tier_avx2 = {
    .isa = GLM53_ISA_AVX2,
    .weigh = glm53_weigh_avx2,
    .dense = &glm53_dense_avx2,
    .has_fast16 = glm53_avx2_has_fast16,
    .decode_block = glm53_avx2_decode_block,
    .hadamard = glm53_avx2_hadamard,
    .prepare = prepare,
    .plan = glm53_avx2_plan,
    .multiply_exact = glm53_avx2_multiply_exact,
    .multiply_fast = glm53_avx2_multiply_fast,
    .finish = glm53_avx2_finish,
    .activate = glm53_avx2_activate,
    .add_scaled = glm53_avx2_add_scaled,
    .widen = glm53_avx2_widen,
};

#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2;
#endif
