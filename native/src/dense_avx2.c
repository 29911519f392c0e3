/* AVX2 versions of the dense kernels. */
#include "dense.h"

#ifdef GLM53_HAS_X86
#include "avx2_begin.h"
#include "avx2_math.h"

INLINE float sum_lanes(__m256 v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

INLINE __m256 load_weights(const glm53_dense *w, bool is_f16, size_t at) {
    return is_f16 ? load_f16((const uint16_t *)w->data + at) : _mm256_loadu_ps((const float *)w->data + at);
}

/* rows x outs sums at once, one chain of eight lanes each; rows, outs and is_f16 are compile-time constants.
 */
INLINE void dot_tile(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, bool is_f16,
                     int32_t o, int32_t outs, int32_t n, float *y, size_t y_stride) {
    __m256 sums[4][4];
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t j = 0; j < outs; j++) sums[r][j] = _mm256_setzero_ps();
    }
    for (int32_t i = 0; i < n; i += 8) {
        __m256 column[4];
        for (int32_t j = 0; j < outs; j++) {
            column[j] = load_weights(w, is_f16, (size_t)(o + j) * w->stride + (size_t)i);
        }
        for (int32_t r = 0; r < rows; r++) {
            __m256 row = _mm256_loadu_ps(x + (size_t)r * x_stride + (size_t)i);
            for (int32_t j = 0; j < outs; j++) sums[r][j] = _mm256_fmadd_ps(row, column[j], sums[r][j]);
        }
    }
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t j = 0; j < outs; j++) y[(size_t)r * y_stride + (size_t)(o + j)] = sum_lanes(sums[r][j]);
    }
}

INLINE void dot_rows(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, bool is_f16,
                     int32_t outs, int32_t n, float *y, size_t y_stride) {
    int32_t o = 0;
    for (; o + 4 <= outs; o += 4) dot_tile(x, x_stride, rows, w, is_f16, o, 4, n, y, y_stride);
    for (; o < outs; o++) dot_tile(x, x_stride, rows, w, is_f16, o, 1, n, y, y_stride);
}

INLINE void dot_typed(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, bool is_f16,
                      int32_t outs, int32_t n, float *y, size_t y_stride) {
    int32_t r = 0;
    for (; r + 3 <= rows; r += 3) { /* 12 sums and 4 columns of weights fill the registers */
        dot_rows(x + (size_t)r * x_stride, x_stride, 3, w, is_f16, outs, n, y + (size_t)r * y_stride,
                 y_stride);
    }
    for (; r < rows; r++) {
        dot_rows(x + (size_t)r * x_stride, x_stride, 1, w, is_f16, outs, n, y + (size_t)r * y_stride,
                 y_stride);
    }
}

static void dot(const float *x, size_t x_stride, int32_t rows, const glm53_dense *w, int32_t outs, int32_t n,
                float *y, size_t y_stride) {
    if (w->is_f16) {
        dot_typed(x, x_stride, rows, w, true, outs, n, y, y_stride);
    } else {
        dot_typed(x, x_stride, rows, w, false, outs, n, y, y_stride);
    }
}

static float sum_squares(const float *x, int32_t n) {
    __m256 sum = _mm256_setzero_ps();
    for (int32_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        sum = _mm256_fmadd_ps(v, v, sum);
    }
    return sum_lanes(sum);
}

static void scale(const float *x, float factor, const float *weight, int32_t n, float *y) {
    const __m256 f = _mm256_set1_ps(factor);
    for (int32_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), f);
        if (weight) v = _mm256_mul_ps(v, _mm256_loadu_ps(weight + i));
        _mm256_storeu_ps(y + i, v);
    }
}

static void mix_in(const float *x, size_t stride, const float *pre, int32_t n, float *u) {
    for (int32_t i = 0; i < n; i += 8) {
        __m256 sum = _mm256_mul_ps(_mm256_set1_ps(pre[0]), _mm256_loadu_ps(x + i));
        for (size_t s = 1; s < GLM53_STREAMS; s++) {
            sum = _mm256_fmadd_ps(_mm256_set1_ps(pre[s]), _mm256_loadu_ps(x + s * stride + (size_t)i), sum);
        }
        _mm256_storeu_ps(u + i, sum);
    }
}

static void mix_out(const float *x, size_t stride, const float *y, const float *post, const float *comb,
                    int32_t n, float *out) {
    for (int32_t i = 0; i < n; i += 8) {
        __m256 old[GLM53_STREAMS];
        for (size_t s = 0; s < GLM53_STREAMS; s++) old[s] = _mm256_loadu_ps(x + s * stride + (size_t)i);
        __m256 add = _mm256_loadu_ps(y + i);
        for (size_t j = 0; j < GLM53_STREAMS; j++) {
            __m256 sum = _mm256_mul_ps(_mm256_set1_ps(post[j]), add);
            for (size_t s = 0; s < GLM53_STREAMS; s++) {
                sum = _mm256_fmadd_ps(_mm256_set1_ps(comb[s * GLM53_STREAMS + j]), old[s], sum);
            }
            _mm256_storeu_ps(out + j * stride + (size_t)i, sum);
        }
    }
}

/* Two passes over the state, in two halves of the value channels whose sums fit the registers. */
static void kda_token(float *state, const float *q, const float *k, const float *v, const float *g,
                      float beta, float *o) {
    enum { D = GLM53_KDA_DIM, HALF = D / 2, VECTORS = HALF / 8 };
    float decay[D], factor[D], out[D];
    for (int32_t i = 0; i < D; i += 8) {
        __m256 d = exp_ps(_mm256_loadu_ps(g + i));
        _mm256_storeu_ps(decay + i, d);
        _mm256_storeu_ps(factor + i, _mm256_mul_ps(d, _mm256_loadu_ps(k + i)));
    }
    for (int32_t half = 0; half < D; half += HALF) {
        __m256 sums[VECTORS], delta[VECTORS];
        for (int32_t j = 0; j < VECTORS; j++) sums[j] = _mm256_setzero_ps();
        for (int32_t i = 0; i < D; i++) {
            const float *row = state + i * D + half;
            __m256 f = _mm256_broadcast_ss(factor + i);
            for (int32_t j = 0; j < VECTORS; j++) {
                sums[j] = _mm256_fmadd_ps(f, _mm256_loadu_ps(row + 8 * j), sums[j]);
            }
        }
        for (int32_t j = 0; j < VECTORS; j++) {
            __m256 rest = _mm256_sub_ps(_mm256_loadu_ps(v + half + 8 * j), sums[j]);
            delta[j] = _mm256_mul_ps(_mm256_set1_ps(beta), rest);
            sums[j] = _mm256_setzero_ps();
        }
        for (int32_t i = 0; i < D; i++) {
            float *row = state + i * D + half;
            __m256 d = _mm256_broadcast_ss(decay + i), key = _mm256_broadcast_ss(k + i);
            __m256 query = _mm256_broadcast_ss(q + i);
            for (int32_t j = 0; j < VECTORS; j++) {
                __m256 value = _mm256_mul_ps(d, _mm256_loadu_ps(row + 8 * j));
                value = _mm256_fmadd_ps(key, delta[j], value);
                _mm256_storeu_ps(row + 8 * j, value);
                sums[j] = _mm256_fmadd_ps(query, value, sums[j]);
            }
        }
        for (int32_t j = 0; j < VECTORS; j++) _mm256_storeu_ps(out + half + 8 * j, sums[j]);
    }
    memcpy(o, out, sizeof out);
}

static void conv_token(const float *taps[GLM53_CONV_TAPS], const float *weight, size_t stride, int32_t n,
                       float *y) {
    for (int32_t i = 0; i < n; i += 8) {
        __m256 sum = _mm256_mul_ps(_mm256_loadu_ps(weight + i), _mm256_loadu_ps(taps[0] + i));
        for (size_t t = 1; t < GLM53_CONV_TAPS; t++) {
            sum = _mm256_fmadd_ps(_mm256_loadu_ps(weight + t * stride + (size_t)i),
                                  _mm256_loadu_ps(taps[t] + i), sum);
        }
        _mm256_storeu_ps(y + i, silu_ps(sum));
    }
}

/* heads x count sums at once; both are compile-time constants. */
INLINE void scores_tile(const float *q, int32_t heads, const float *const *rows, int32_t count, int32_t n,
                        float factor, float *scores, size_t stride) {
    __m256 sums[4][3];
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t j = 0; j < count; j++) sums[h][j] = _mm256_setzero_ps();
    }
    for (int32_t i = 0; i < n; i += 8) {
        __m256 row[3];
        for (int32_t j = 0; j < count; j++) row[j] = _mm256_loadu_ps(rows[j] + i);
        for (int32_t h = 0; h < heads; h++) {
            __m256 query = _mm256_loadu_ps(q + (size_t)h * (size_t)n + (size_t)i);
            for (int32_t j = 0; j < count; j++) sums[h][j] = _mm256_fmadd_ps(query, row[j], sums[h][j]);
        }
    }
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t j = 0; j < count; j++) {
            scores[(size_t)h * stride + (size_t)j] = factor * sum_lanes(sums[h][j]);
        }
    }
}

INLINE void scores_heads(const float *q, int32_t heads, const float *const *rows, int32_t count, int32_t n,
                         float factor, float *scores, size_t stride) {
    int32_t j = 0;
    for (; j + 3 <= count; j += 3) scores_tile(q, heads, rows + j, 3, n, factor, scores + j, stride);
    for (; j < count; j++) scores_tile(q, heads, rows + j, 1, n, factor, scores + j, stride);
}

static void scores_at(const float *q, int32_t heads, const float *const *rows, int32_t count, int32_t n,
                      float factor, float *scores, size_t stride) {
    int32_t h = 0;
    for (; h + 4 <= heads; h += 4) { /* 12 sums and 3 rows fill the registers */
        scores_heads(q + (size_t)h * (size_t)n, 4, rows, count, n, factor, scores + (size_t)h * stride,
                     stride);
    }
    for (; h < heads; h++) {
        scores_heads(q + (size_t)h * (size_t)n, 1, rows, count, n, factor, scores + (size_t)h * stride,
                     stride);
    }
}

/* exp_ps takes a NaN for a very small number; here it must stay one. */
INLINE __m256 exp_or_nan(__m256 x) { return _mm256_fmadd_ps(x, _mm256_setzero_ps(), exp_ps(x)); }

static void softmax(float *x, int32_t count) {
    float most = x[0];
    for (int32_t i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    const __m256 top = _mm256_set1_ps(most);
    __m256 sums = _mm256_setzero_ps();
    int32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 e = exp_or_nan(_mm256_sub_ps(_mm256_loadu_ps(x + i), top));
        _mm256_storeu_ps(x + i, e);
        sums = _mm256_add_ps(sums, e);
    }
    float rest[8] = {0};
    if (i < count) {
        for (int32_t j = i; j < count; j++) rest[j - i] = x[j];
        _mm256_storeu_ps(rest, exp_or_nan(_mm256_sub_ps(_mm256_loadu_ps(rest), top)));
    }
    float sum = sum_lanes(sums);
    for (int32_t j = i; j < count; j++) {
        x[j] = rest[j - i];
        sum += x[j];
    }
    const __m256 divisor = _mm256_set1_ps(sum);
    for (i = 0; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(x + i, _mm256_div_ps(_mm256_loadu_ps(x + i), divisor));
    }
    for (; i < count; i++) x[i] /= sum;
}

/* heads x 8 width columns of the sum; heads and width are compile-time constants. */
INLINE void mix_tile(const float *weights, size_t stride, int32_t heads, const float *const *rows,
                     int32_t count, int32_t n, int32_t first, int32_t width, float *y) {
    __m256 sums[4][2];
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t c = 0; c < width; c++) {
            sums[h][c] = _mm256_loadu_ps(y + (size_t)h * (size_t)n + (size_t)(first + 8 * c));
        }
    }
    for (int32_t j = 0; j < count; j++) {
        __m256 row[2];
        for (int32_t c = 0; c < width; c++) row[c] = _mm256_loadu_ps(rows[j] + first + 8 * c);
        for (int32_t h = 0; h < heads; h++) {
            __m256 weight = _mm256_broadcast_ss(weights + (size_t)h * stride + (size_t)j);
            for (int32_t c = 0; c < width; c++) sums[h][c] = _mm256_fmadd_ps(weight, row[c], sums[h][c]);
        }
    }
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t c = 0; c < width; c++) {
            _mm256_storeu_ps(y + (size_t)h * (size_t)n + (size_t)(first + 8 * c), sums[h][c]);
        }
    }
}

INLINE void mix_heads(const float *weights, size_t stride, int32_t heads, const float *const *rows,
                      int32_t count, int32_t n, float *y) {
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) mix_tile(weights, stride, heads, rows, count, n, i, 2, y);
    for (; i < n; i += 8) mix_tile(weights, stride, heads, rows, count, n, i, 1, y);
}

static void mix_at(const float *weights, size_t stride, int32_t heads, const float *const *rows,
                   int32_t count, int32_t n, float *y) {
    int32_t h = 0;
    for (; h + 4 <= heads; h += 4) { /* 8 sums: as many as the FMA units need in flight */
        mix_heads(weights + (size_t)h * stride, stride, 4, rows, count, n, y + (size_t)h * (size_t)n);
    }
    for (; h < heads; h++) {
        mix_heads(weights + (size_t)h * stride, stride, 1, rows, count, n, y + (size_t)h * (size_t)n);
    }
}

#include "target_end.h"

const glm53_dense_kernels glm53_dense_avx2 = {
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

#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2;
#endif
