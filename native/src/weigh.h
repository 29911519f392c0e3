/* Weights of a row of logits in double precision, for the sampler: one function per instruction set, all of
 * which give the same bits, since every operation is a fused multiply-add or rounds alike. Not installed. */
#ifndef GLM53_WEIGH_H
#define GLM53_WEIGH_H

#include <math.h>

#include "internal.h"

enum { GLM53_WEIGHT_BLOCK = 128 }; /* weights that share a sum */

/* What weigh() computes. e^z = 2^n e^r, z = n ln 2 + r with |r| <= ln 2 / 2. Adding and subtracting SHIFT
 * rounds to a whole number, which then stands in the low bits. ln 2 is taken in two parts, the first with
 * zeros enough for n times it to be exact. The Taylor sum from r^13 down leaves 4e-18. */
#define GLM53_EXP_SHIFT 0x1.8p52
#define GLM53_EXP_LOG2_E 0x1.71547652b82fep0
#define GLM53_EXP_LN2_HIGH 0x1.62e42fee00000p-1
#define GLM53_EXP_LN2_LOW 0x1.a39ef35793c76p-33
#define GLM53_EXP_LEAST (-708.0) /* below, results are about to become subnormal: 0 */
enum { GLM53_EXP_TERMS = 14 };
static const double glm53_exp_terms[GLM53_EXP_TERMS] = {
    1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
    1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0,
};

/* Give a block of logits at x, completed by minus infinity (in `padded`) where fewer than a block are left.
 */
static inline const float *glm53_whole_block(const float *x, int32_t left, float *padded) {
    if (left >= GLM53_WEIGHT_BLOCK) return x;
    for (int32_t i = 0; i < GLM53_WEIGHT_BLOCK; i++) padded[i] = i < left ? x[i] : -INFINITY;
    return padded;
}

void glm53_weigh_scalar(const float *logits, int32_t n, double largest, double slope, double least,
                        double *weights, double *sums);
#ifdef GLM53_HAS_X86
void glm53_weigh_avx2(const float *logits, int32_t n, double largest, double slope, double least,
                      double *weights, double *sums);
void glm53_weigh_avx512(const float *logits, int32_t n, double largest, double slope, double least,
                        double *weights, double *sums);
#endif

#endif
