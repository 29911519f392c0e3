/* The sampler's weights with AVX2 and FMA. */
#include "weigh.h"

#ifdef GLM53_HAS_X86
#include "avx2_begin.h"

INLINE __m256d weights_of(__m128 logits, __m256d largest, __m256d slope, __m256d least) {
    const __m256d shift = _mm256_set1_pd(GLM53_EXP_SHIFT);
    __m256d z = _mm256_mul_pd(_mm256_sub_pd(_mm256_cvtps_pd(logits), largest), slope);
    __m256d shifted = _mm256_fmadd_pd(z, _mm256_set1_pd(GLM53_EXP_LOG2_E), shift);
    __m256d n = _mm256_sub_pd(shifted, shift);
    __m256d r = _mm256_fnmadd_pd(n, _mm256_set1_pd(GLM53_EXP_LN2_HIGH), z);
    r = _mm256_fnmadd_pd(n, _mm256_set1_pd(GLM53_EXP_LN2_LOW), r);
    __m256d p = _mm256_set1_pd(glm53_exp_terms[0]);
    for (int32_t i = 1; i < GLM53_EXP_TERMS; i++) {
        p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(glm53_exp_terms[i]));
    }
    __m256i exponent = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
    p = _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), exponent));
    p = _mm256_and_pd(p, _mm256_cmp_pd(z, _mm256_set1_pd(GLM53_EXP_LEAST), _CMP_GE_OQ));
    return _mm256_and_pd(p, _mm256_cmp_pd(p, least, _CMP_GE_OQ));
}

void glm53_weigh_avx2(const float *logits, int32_t n, double largest, double slope, double least,
                      double *weights, double *sums) {
    enum { BLOCK = GLM53_WEIGHT_BLOCK };
    const __m256d top = _mm256_set1_pd(largest), k = _mm256_set1_pd(slope), low = _mm256_set1_pd(least);
    for (int32_t begin = 0; begin < n; begin += BLOCK) {
        float padded[BLOCK];
        const float *x = glm53_whole_block(logits + begin, n - begin, padded);
        __m256d a = _mm256_setzero_pd(), b = a;
        for (int32_t i = 0; i < BLOCK; i += 8) {
            __m256d v = weights_of(_mm_loadu_ps(x + i), top, k, low);
            __m256d w = weights_of(_mm_loadu_ps(x + i + 4), top, k, low);
            _mm256_storeu_pd(weights + begin + i, v);
            _mm256_storeu_pd(weights + begin + i + 4, w);
            a = _mm256_add_pd(a, v);
            b = _mm256_add_pd(b, w);
        }
        a = _mm256_add_pd(a, b);
        __m128d c = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
        sums[begin / BLOCK] = _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
    }
}

#include "target_end.h"

#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2_weights;
#endif
