/* AVX2: products of byte sums with 16-bit activations (codebook mul1). */
#include "exl3_avx2.h"

#ifdef GLM53_HAS_X86
#include "avx2_begin.h"
#include "avx2_weights.h"

/* The integer sum of a block fits: 128 * 1005 * 16383 < 2^31. */
INLINE void flush_fast(const __m256i sums[2 * GROUPS], const glm53_fast_block *block, float *acc,
                       bool is_first) {
    for (int32_t half = 0; half < 2; half++) {
        __m256i low = _mm256_hadd_epi32(sums[half], sums[2 + half]);
        __m256i high = _mm256_hadd_epi32(sums[4 + half], sums[6 + half]);
        __m256i columns = _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(low, high), column_order());
        __m256 part = _mm256_fmadd_ps(_mm256_cvtepi32_ps(columns), _mm256_set1_ps(block->slope),
                                      _mm256_set1_ps(block->offset));
        add_to(acc + 8 * half, part, is_first);
    }
}

INLINE __m256i octet(const int16_t *q) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)q));
}

INLINE void fused_fast(const glm53_rect *rect, const tile_plan *plan, tile_format format, int32_t rows) {
    tile_stream streams[K_TILES];
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            if (format != FORMAT_K3) fill_streams(streams, column, rect->matrix->bits_x2);
            states_pipeline pipeline;
            start_states(&pipeline, column, streams, plan, format);
            __m256i sums[2][2 * GROUPS];
            for (int32_t g = 0; g < GROUPS; g++) {
                __m256i s[2][2] = {{_mm256_setzero_si256(), _mm256_setzero_si256()},
                                   {_mm256_setzero_si256(), _mm256_setzero_si256()}};
#pragma GCC unroll 8
                for (int32_t kt = 0; kt < K_TILES; kt++) {
                    __m256i current[PAIRS];
                    advance_states(&pipeline, column, streams, plan, format, g, kt, current);
                    byte_sums_x4(current);
                    for (int32_t r = 0; r < rows; r++) {
                        const int16_t *x = fast_block_of(rect, b, r)->q + 16 * kt;
                        for (int32_t q = 0; q < PAIRS; q++) {
                            __m256i products = _mm256_madd_epi16(current[q], octet(x + 8 * (q & 1)));
                            s[r][q >> 1] = _mm256_add_epi32(s[r][q >> 1], products);
                        }
                    }
                }
                for (int32_t r = 0; r < rows; r++) {
                    sums[r][2 * g] = s[r][0];
                    sums[r][2 * g + 1] = s[r][1];
                }
            }
            for (int32_t r = 0; r < rows; r++) {
                flush_fast(sums[r], fast_block_of(rect, b, r), acc_of(rect, r, nt), b == rect->block_begin);
            }
        }
    }
}

typedef struct {
    __m256i w[GROUPS][K_TILES][PAIRS];
} fast_buffer;

INLINE void fill_fast(fast_buffer *buffer, const glm53_matrix *matrix, tile_column column,
                      const tile_plan *plan, tile_format format) {
    tile_stream streams[K_TILES];
    if (format != FORMAT_K3) fill_streams(streams, column, matrix->bits_x2);
    for (int32_t g = 0; g < GROUPS; g++) {
        for (int32_t kt = 0; kt < K_TILES; kt++) {
            __m256i states[PAIRS];
            group_states(column, streams, plan, format, g, kt, states);
            byte_sums_x4(states);
            for (int32_t q = 0; q < PAIRS; q++) buffer->w[g][kt][q] = states[q];
        }
    }
}

INLINE void buffered_fast(const glm53_rect *rect, const fast_buffer *buffer, int32_t b, int32_t nt, int32_t r,
                          int32_t count) {
    __m256i sums[4][2 * GROUPS];
    for (int32_t g = 0; g < GROUPS; g++) {
        __m256i s[4][2];
        for (int32_t i = 0; i < count; i++) s[i][0] = s[i][1] = _mm256_setzero_si256();
        for (int32_t kt = 0; kt < K_TILES; kt++) {
            for (int32_t k = 0; k < 2; k++) {
                __m256i w0 = buffer->w[g][kt][k], w1 = buffer->w[g][kt][2 + k];
                for (int32_t i = 0; i < count; i++) {
                    __m256i x = octet(fast_block_of(rect, b, r + i)->q + 16 * kt + 8 * k);
                    s[i][0] = _mm256_add_epi32(s[i][0], _mm256_madd_epi16(w0, x));
                    s[i][1] = _mm256_add_epi32(s[i][1], _mm256_madd_epi16(w1, x));
                }
            }
        }
        for (int32_t i = 0; i < count; i++) {
            sums[i][2 * g] = s[i][0];
            sums[i][2 * g + 1] = s[i][1];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        flush_fast(sums[i], fast_block_of(rect, b, r + i), acc_of(rect, r + i, nt), b == rect->block_begin);
    }
}

static void multiply_buffered_fast(const glm53_rect *rect, const tile_plan *plan) {
    fast_buffer buffer;
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            if (rect->matrix->bits_x2 == 6) {
                fill_fast(&buffer, rect->matrix, column, plan, FORMAT_K3);
            } else if (rect->matrix->bits_x2 <= 8) {
                fill_fast(&buffer, rect->matrix, column, plan, FORMAT_LOW);
            } else {
                fill_fast(&buffer, rect->matrix, column, plan, FORMAT_HIGH);
            }
            int32_t r = 0;
            for (; r + 4 <= rect->rows; r += 4) buffered_fast(rect, &buffer, b, nt, r, 4);
            for (; r + 2 <= rect->rows; r += 2) buffered_fast(rect, &buffer, b, nt, r, 2);
            if (r < rect->rows) buffered_fast(rect, &buffer, b, nt, r, 1);
        }
    }
}

void glm53_avx2_multiply_fast(const glm53_rect *rect) {
    const tile_plan *plan = rect->plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    if (rect->rows > 2) {
        multiply_buffered_fast(rect, plan);
    } else if (bits_x2 == 6) {
        if (rect->rows == 1) {
            fused_fast(rect, plan, FORMAT_K3, 1);
        } else {
            fused_fast(rect, plan, FORMAT_K3, 2);
        }
    } else if (bits_x2 <= 8 && rect->rows == 1) {
        fused_fast(rect, plan, FORMAT_LOW, 1);
    } else if (bits_x2 > 8 && rect->rows == 1) {
        fused_fast(rect, plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_fast(rect, plan);
    }
}

#include "target_end.h"
#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2;
#endif
