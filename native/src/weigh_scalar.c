/* The sampler's weights in portable C. */
#include "weigh.h"

static double weight_of(float logit, double largest, double slope) {
    double z = ((double)logit - largest) * slope;
    double shifted = fma(z, GLM53_EXP_LOG2_E, GLM53_EXP_SHIFT), n = shifted - GLM53_EXP_SHIFT;
    double r = fma(n, -GLM53_EXP_LN2_LOW, fma(n, -GLM53_EXP_LN2_HIGH, z));
    double p = glm53_exp_terms[0];
    for (int32_t i = 1; i < GLM53_EXP_TERMS; i++) p = fma(p, r, glm53_exp_terms[i]);
    uint64_t bits, exponent;
    memcpy(&bits, &p, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 52;
    memcpy(&p, &bits, sizeof p);
    return z >= GLM53_EXP_LEAST ? p : 0.0;
}

void glm53_weigh_scalar(const float *logits, int32_t n, double largest, double slope, double least,
                        double *weights, double *sums) {
    enum { BLOCK = GLM53_WEIGHT_BLOCK };
    for (int32_t begin = 0; begin < n; begin += BLOCK) {
        double lanes[8] = {0};
        for (int32_t i = begin; i < begin + BLOCK; i++) {
            double weight = i < n ? weight_of(logits[i], largest, slope) : 0.0;
            weights[i] = weight >= least ? weight : 0.0;
            lanes[i % 8] += weights[i];
        }
        sums[begin / BLOCK] =
            ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    }
}
