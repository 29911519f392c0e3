/* Portable versions of the dense kernels: plain loops in natural order. */
#include <math.h>

#include "dense.h"

static float silu(float x) { return x / (1.0f + expf(-x)); }

static void dot(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, int32_t outs, int32_t n,
                float *y, size_t y_stride) {
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t o = 0; o < outs; o++) {
            const float *xr = x + (size_t)r * x_stride;
            size_t first = (size_t)o * w->stride;
            float sum = 0.0f;
            for (int32_t i = 0; i < n; i++) {
                size_t at = first + (size_t)i;
                sum += xr[i] * (w->is_f16 ? glm53_f16_to_f32(((const uint16_t *)w->data)[at])
                                          : ((const float *)w->data)[at]);
            }
            y[(size_t)r * y_stride + (size_t)o] = sum;
        }
    }
}

static float sum_squares(const float *x, int32_t n) {
    float total = 0.0f;
    for (int32_t i = 0; i < n; i += 8) { /* eights first: the error grows with the number of eights */
        float sum = 0.0f;
        for (int32_t j = i; j < i + 8; j++) sum += x[j] * x[j];
        total += sum;
    }
    return total;
}

static void scale(const float *x, float factor, const float *weight, int32_t n, float *y) {
    for (int32_t i = 0; i < n; i++) y[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

static void mix_in(const float *x, size_t stride, const float *pre, int32_t n, float *u) {
    for (int32_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int32_t s = 0; s < GLM53_STREAMS; s++) sum += pre[s] * x[(size_t)s * stride + (size_t)i];
        u[i] = sum;
    }
}

static void mix_out(const float *x, size_t stride, const float *y, const float *post, const float *comb,
                    int32_t n, float *out) {
    for (int32_t i = 0; i < n; i++) {
        float old[GLM53_STREAMS];
        for (int32_t s = 0; s < GLM53_STREAMS; s++) old[s] = x[(size_t)s * stride + (size_t)i];
        for (int32_t j = 0; j < GLM53_STREAMS; j++) {
            float sum = post[j] * y[i];
            for (int32_t s = 0; s < GLM53_STREAMS; s++) sum += comb[s * GLM53_STREAMS + j] * old[s];
            out[(size_t)j * stride + (size_t)i] = sum;
        }
    }
}

static void kda_token(float *state, const float *q, const float *k, const float *v, const float *g,
                      float beta, float *o) {
    enum { D = GLM53_KDA_DIM };
    float decay[D], delta[D] = {0}, out[D] = {0};
    for (int32_t i = 0; i < D; i++) {
        decay[i] = expf(g[i]);
        float factor = k[i] * decay[i];
        for (int32_t j = 0; j < D; j++) delta[j] += factor * state[i * D + j];
    }
    for (int32_t j = 0; j < D; j++) delta[j] = beta * (v[j] - delta[j]);
    for (int32_t i = 0; i < D; i++) {
        for (int32_t j = 0; j < D; j++) {
            float value = decay[i] * state[i * D + j] + k[i] * delta[j];
            state[i * D + j] = value;
            out[j] += q[i] * value;
        }
    }
    memcpy(o, out, sizeof out);
}

static void conv_token(const float *taps[GLM53_CONV_TAPS], const float *weight, size_t stride, int32_t n,
                       float *y) {
    for (int32_t i = 0; i < n; i++) {
        float sum = 0.0f;
        for (int32_t t = 0; t < GLM53_CONV_TAPS; t++)
            sum += weight[(size_t)t * stride + (size_t)i] * taps[t][i];
        y[i] = silu(sum);
    }
}

static void scores_at(const float *q, int32_t heads, const float *const *rows, int32_t count, int32_t n,
                      float factor, float *scores, size_t stride) {
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t j = 0; j < count; j++) {
            float sum = 0.0f;
            for (int32_t i = 0; i < n; i++) sum += q[(size_t)h * (size_t)n + (size_t)i] * rows[j][i];
            scores[(size_t)h * stride + (size_t)j] = factor * sum;
        }
    }
}

static void softmax(float *x, int32_t count) {
    float most = x[0], sum = 0.0f;
    for (int32_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int32_t i = 0; i < count; i++) {
        x[i] = expf(x[i] - most);
        sum += x[i];
    }
    for (int32_t i = 0; i < count; i++) x[i] /= sum;
}

static void mix_at(const float *weights, size_t stride, int32_t heads, const float *const *rows,
                   int32_t count, int32_t n, float *y) {
    for (int32_t h = 0; h < heads; h++) {
        float *out = y + (size_t)h * (size_t)n;
        for (int32_t j = 0; j < count; j++) {
            float weight = weights[(size_t)h * stride + (size_t)j];
            for (int32_t i = 0; i < n; i++) out[i] += weight * rows[j][i];
        }
    }
}

const glm53_dense_kernels glm53_dense_scalar = {
    .dot = dot,
    .sum_squares = sum_squares,
    .scale = scale,
    .mix_in = mix_in,
    .mix_out = mix_out,
    .kda_token = kda_token,
    .conv_token = conv_token,
    .scores_at = scores_at,
    .softmax = softmax,
    .mix_at = mix_at,
};
