/* AVX2: products in float32 with exact weights, and plain decoding. */
#include "exl3_avx2.h"

#ifdef GLM53_HAS_X86
#include "avx2_begin.h"
#include "avx2_weights.h"

/* sums[2 g + half] of one row -> 16 columns of acc. */
INLINE void flush_exact(const __m256 sums[2 * GROUPS], float *acc, bool is_first) {
    for (int32_t half = 0; half < 2; half++) {
        __m256 low = _mm256_hadd_ps(sums[half], sums[2 + half]);
        __m256 high = _mm256_hadd_ps(sums[4 + half], sums[6 + half]);
        __m256 columns = _mm256_permutevar8x32_ps(_mm256_hadd_ps(low, high), column_order());
        add_to(acc + 8 * half, columns, is_first);
    }
}

INLINE __m256 quad(const float *x) { return _mm256_broadcast_ps((const __m128 *)(const void *)x); }

/* Decode and multiply in registers: for one or two rows. */
INLINE void fused_exact(const glm53_rect *rect, const tile_plan *plan, tile_format format, int32_t rows) {
    tile_stream streams[K_TILES];
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            if (format != FORMAT_K3) fill_streams(streams, column, rect->matrix->bits_x2);
            sums_pipeline pipeline;
            start_sums(&pipeline, column, streams, plan, format);
            __m256 sums[2][2 * GROUPS];
            for (int32_t g = 0; g < GROUPS; g++) {
                __m256 s[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
                                  {_mm256_setzero_ps(), _mm256_setzero_ps()}};
#pragma GCC unroll 8
                for (int32_t kt = 0; kt < K_TILES; kt++) {
                    __m256i current[PAIRS];
                    advance_sums(&pipeline, column, streams, plan, format, g, kt, current);
                    for (int32_t half = 0; half < 2; half++) {
                        __m256 w[4];
                        mul1_weights_x4(current + 2 * half, w);
                        for (int32_t r = 0; r < rows; r++) {
                            const float *x = block_of(rect, b, r) + 16 * kt;
                            for (int32_t k = 0; k < 4; k++) {
                                s[r][half] = _mm256_fmadd_ps(w[k], quad(x + 4 * k), s[r][half]);
                            }
                        }
                    }
                }
                for (int32_t r = 0; r < rows; r++) {
                    sums[r][2 * g] = s[r][0];
                    sums[r][2 * g + 1] = s[r][1];
                }
            }
            for (int32_t r = 0; r < rows; r++) {
                flush_exact(sums[r], acc_of(rect, r, nt), b == rect->block_begin);
            }
        }
    }
}

/* One block of one column of tiles, decoded: 8 KiB. */
typedef struct {
    __m256 w[GROUPS][K_TILES][PAIRS][2];
} exact_buffer;

INLINE void fill_exact(exact_buffer *buffer, const glm53_matrix *matrix, tile_column column,
                       const tile_plan *plan, tile_format format, int32_t codebook) {
    tile_stream streams[K_TILES];
    if (format != FORMAT_K3) fill_streams(streams, column, matrix->bits_x2);
    for (int32_t g = 0; g < GROUPS; g++) {
        for (int32_t kt = 0; kt < K_TILES; kt++) {
            __m256i states[PAIRS];
            group_states(column, streams, plan, format, g, kt, states);
            if (codebook == GLM53_CODEBOOK_MUL1) {
                byte_sums_x4(states);
                mul1_weights_x4(states, buffer->w[g][kt][0]);
                mul1_weights_x4(states + 2, buffer->w[g][kt][2]);
                continue;
            }
            for (int32_t q = 0; q < PAIRS; q++) {
                three_inst_pair(states[q], codebook, &buffer->w[g][kt][q][0], &buffer->w[g][kt][q][1]);
            }
        }
    }
}

/* Rows [r, r + count) times the buffer; count is a compile-time constant, at most 4. */
INLINE void buffered_exact(const glm53_rect *rect, const exact_buffer *buffer, int32_t b, int32_t nt,
                           int32_t r, int32_t count) {
    __m256 sums[4][2 * GROUPS];
    for (int32_t g = 0; g < GROUPS; g++) {
        __m256 s[4][2];
        for (int32_t i = 0; i < count; i++) s[i][0] = s[i][1] = _mm256_setzero_ps();
        for (int32_t kt = 0; kt < K_TILES; kt++) {
            for (int32_t k = 0; k < 4;
                 k++) { /* the tile's four quads of rows, in the order of the fused kernel */
                __m256 w0 = buffer->w[g][kt][k >> 1][k & 1], w1 = buffer->w[g][kt][2 + (k >> 1)][k & 1];
                for (int32_t i = 0; i < count; i++) {
                    __m256 x = quad(block_of(rect, b, r + i) + 16 * kt + 4 * k);
                    s[i][0] = _mm256_fmadd_ps(w0, x, s[i][0]);
                    s[i][1] = _mm256_fmadd_ps(w1, x, s[i][1]);
                }
            }
        }
        for (int32_t i = 0; i < count; i++) {
            sums[i][2 * g] = s[i][0];
            sums[i][2 * g + 1] = s[i][1];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        flush_exact(sums[i], acc_of(rect, r + i, nt), b == rect->block_begin);
    }
}

static void decode_exact(exact_buffer *buffer, const glm53_matrix *matrix, tile_column column,
                         const tile_plan *plan) {
    int32_t codebook = matrix->codebook;
    if (codebook == GLM53_CODEBOOK_MUL1) {
        if (matrix->bits_x2 == 6) {
            fill_exact(buffer, matrix, column, plan, FORMAT_K3, GLM53_CODEBOOK_MUL1);
        } else if (matrix->bits_x2 <= 8) {
            fill_exact(buffer, matrix, column, plan, FORMAT_LOW, GLM53_CODEBOOK_MUL1);
        } else {
            fill_exact(buffer, matrix, column, plan, FORMAT_HIGH, GLM53_CODEBOOK_MUL1);
        }
    } else if (matrix->bits_x2 <= 8) {
        fill_exact(buffer, matrix, column, plan, FORMAT_LOW, codebook);
    } else {
        fill_exact(buffer, matrix, column, plan, FORMAT_HIGH, codebook);
    }
}

static void multiply_buffered_exact(const glm53_rect *rect, const tile_plan *plan) {
    exact_buffer buffer;
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            decode_exact(&buffer, rect->matrix, column, plan);
            int32_t r = 0;
            for (; r + 4 <= rect->rows; r += 4) buffered_exact(rect, &buffer, b, nt, r, 4);
            for (; r + 2 <= rect->rows; r += 2) buffered_exact(rect, &buffer, b, nt, r, 2);
            if (r < rect->rows) buffered_exact(rect, &buffer, b, nt, r, 1);
        }
    }
}

_Static_assert(sizeof(tile_plan) <= GLM53_PLAN_BYTES, "a plan does not fit");

void glm53_avx2_plan(int32_t bits_x2, void *plan) { plan_tiles(plan, bits_x2); }

void glm53_avx2_multiply_exact(const glm53_rect *rect) {
    const tile_plan *plan = rect->plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    if (rect->rows > 2 || rect->matrix->codebook != GLM53_CODEBOOK_MUL1) {
        multiply_buffered_exact(rect, plan);
    } else if (bits_x2 == 6) {
        if (rect->rows == 1) {
            fused_exact(rect, plan, FORMAT_K3, 1);
        } else {
            fused_exact(rect, plan, FORMAT_K3, 2);
        }
    } else if (bits_x2 <= 8 && rect->rows == 1) {
        fused_exact(rect, plan, FORMAT_LOW, 1);
    } else if (bits_x2 > 8 && rect->rows == 1) {
        fused_exact(rect, plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_exact(rect, plan);
    }
}

void glm53_avx2_decode_block(const glm53_matrix *matrix, int32_t b, float *w) {
    tile_plan plan;
    plan_tiles(&plan, matrix->bits_x2);
    size_t out = (size_t)matrix->out_features;
    const glm53_rect rect = {.matrix = matrix};
    for (int32_t nt = 0; nt < matrix->out_features / GLM53_TILE; nt++) {
        exact_buffer buffer;
        decode_exact(&buffer, matrix, column_at(&rect, b, nt), &plan);
        for (int32_t i = 0; i < GROUPS * K_TILES * PAIRS * 2; i++) {
            int32_t odd = i & 1, q = i >> 1 & 3, kt = i >> 3 & 7, g = i >> 6;
            float lanes[8];
            _mm256_storeu_ps(lanes, buffer.w[g][kt][q][odd]);
            for (int32_t lane = 0; lane < 8; lane++) {
                int32_t row = 16 * kt + 2 * (lane & 3) + odd + 8 * (q & 1);
                int32_t column = 16 * nt + 2 * g + (lane >> 2) + 8 * (q >> 1);
                w[(size_t)row * out + (size_t)column] = lanes[lane];
            }
        }
    }
}

#include "target_end.h"
#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2;
#endif
