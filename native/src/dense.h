/* The float kernels of the CPU engine's remaining hot loops: one table per instruction set. Not installed. */
#ifndef GLM53_DENSE_H
#define GLM53_DENSE_H

#include "internal.h"

enum {
    GLM53_STREAMS = 4,   /* residual streams of a hyper-connection */
    GLM53_KDA_DIM = 128, /* key and value channels of a head */
    GLM53_CONV_TAPS = 4,
    GLM53_DOT_SPAN = 1024 /* dot products sum within a span, then add the spans in order */
};

/* A plain matrix (outs, n): row o starts at element o * stride. */
typedef struct {
    const void *data;
    size_t stride;
    bool is_f16;
} glm53_dense;

/* Lengths n are multiples of 8; rows start anywhere. */
struct glm53_dense_kernels {
    /* y[r, o] = sum over i < n of x[r, i] w[o, i]; one order per sum, whatever rows and outs are. */
    void (*dot)(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, int32_t outs, int32_t n,
                float *y, size_t y_stride);
    float (*sum_squares)(const float *x, int32_t n);
    /* y = x * factor * weight; weight may be NULL; y may be x. */
    void (*scale)(const float *x, float factor, const float *weight, int32_t n, float *y);
    /* u = sum_s pre[s] x[s]; stream s starts at s * stride. */
    void (*mix_in)(const float *x, size_t stride, const float *pre, int32_t n, float *u);
    /* out[j] = post[j] y + sum_s comb[s, j] x[s]; out may be x. */
    void (*mix_out)(const float *x, size_t stride, const float *y, const float *post, const float *comb,
                    int32_t n, float *out);
    /* One token of one head; state (128 key, 128 value). o may be q, k, v or g. */
    void (*kda_token)(float *state, const float *q, const float *k, const float *v, const float *g,
                      float beta, float *o);
    /* y = silu(sum_t weight[t] taps[t]), oldest tap first; tap t's weights start at t * stride. */
    void (*conv_token)(const float *taps[GLM53_CONV_TAPS], const float *weight, size_t stride, int32_t n,
                       float *y);
    /* scores[h, j] = scale * q[h] . rows[j]; q (heads, n) contiguous; one order per sum, as in dot. */
    void (*scores_at)(const float *q, int32_t heads, const float *const *rows, int32_t count, int32_t n,
                      float scale, float *scores, size_t stride);
    /* x = e^x / sum of e^x over `count` numbers, any count; returns nothing for a NaN but NaNs. */
    void (*softmax)(float *x, int32_t count);
    /* y[h] += sum over j < count, in that order, of weights[h, j] rows[j]; y (heads, n) contiguous. */
    void (*mix_at)(const float *weights, size_t stride, int32_t heads, const float *const *rows,
                   int32_t count, int32_t n, float *y);
};

extern const glm53_dense_kernels glm53_dense_scalar;
#ifdef GLM53_HAS_X86
extern const glm53_dense_kernels glm53_dense_avx2;
#endif

#endif
