/* The sampler's weights with AVX-512 F. */
#include "weigh.h"

#ifdef GLM53_HAS_X86
#include "avx512_begin.h"

INLINE __m512d weights_of(__m256 logits, __m512d largest, __m512d slope, __m512d least) {
    const __m512d shift = _mm512_set1_pd(GLM53_EXP_SHIFT);
    __m512d z = _mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(logits), largest), slope);
    __m512d shifted = _mm512_fmadd_pd(z, _mm512_set1_pd(GLM53_EXP_LOG2_E), shift);
    __m512d n = _mm512_sub_pd(shifted, shift);
    __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(GLM53_EXP_LN2_HIGH), z);
    r = _mm512_fnmadd_pd(n, _mm512_set1_pd(GLM53_EXP_LN2_LOW), r);
    __m512d p = _mm512_set1_pd(glm53_exp_terms[0]);
    for (int32_t i = 1; i < GLM53_EXP_TERMS; i++) {
        p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(glm53_exp_terms[i]));
    }
    __m512i exponent = _mm512_slli_epi64(_mm512_castpd_si512(shifted), 52);
    p = _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(p), exponent));
    __mmask8 is_kept = _mm512_cmp_pd_mask(z, _mm512_set1_pd(GLM53_EXP_LEAST), _CMP_GE_OQ);
    return _mm512_maskz_mov_pd(_mm512_mask_cmp_pd_mask(is_kept, p, least, _CMP_GE_OQ), p);
}

void glm53_weigh_avx512(const float *logits, int32_t n, double largest, double slope, double least,
                        double *weights, double *sums) {
    enum { BLOCK = GLM53_WEIGHT_BLOCK };
    const __m512d top = _mm512_set1_pd(largest), k = _mm512_set1_pd(slope), low = _mm512_set1_pd(least);
    for (int32_t begin = 0; begin < n; begin += BLOCK) {
        float padded[BLOCK];
        const float *x = glm53_whole_block(logits + begin, n - begin, padded);
        __m512d lanes = _mm512_setzero_pd();
        for (int32_t i = 0; i < BLOCK; i += 8) {
            __m512d w = weights_of(_mm256_loadu_ps(x + i), top, k, low);
            _mm512_storeu_pd(weights + begin + i, w);
            lanes = _mm512_add_pd(lanes, w);
        }
        __m256d a = _mm256_add_pd(_mm512_castpd512_pd256(lanes), _mm512_extractf64x4_pd(lanes, 1));
        __m128d c = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
        sums[begin / BLOCK] = _mm_cvtsd_f64(_mm_add_sd(c, _mm_unpackhi_pd(c, c)));
    }
}

#include "target_end.h"

#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx512_weights;
#endif
