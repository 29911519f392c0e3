/* AVX-512: products in float32 with exact weights. */
#include "exl3_avx512.h"

#ifdef GLM53_HAS_X86
#include "avx512_begin.h"
#include "avx512_weights.h"

/* mul1, see mul1_weights_x4 in avx2_weights.h. vdbpsadbw against zero writes the sum of a product's bytes
 * into the lower half of the float 2^23, which makes it the float 2^23 + sum. */
INLINE void mul1_weights(const __m512i states[PAIRS], __m512 w[PAIRS]) {
    const __m512i factor = _mm512_set1_epi32((int)0x83dcd12du);
    const __m512i magic = _mm512_set1_epi32(0x4b000000), zero = _mm512_setzero_si512();
    const __m512 slope = _mm512_set1_ps(GLM53_MUL1_SLOPE), split = _mm512_set1_ps(8193.0f);
    const __m512 offset = _mm512_set1_ps(GLM53_MUL1_OFFSET - 8388608.0f * GLM53_MUL1_SLOPE);
    __m512 cw[PAIRS];
    for (int32_t q = 0; q < PAIRS; q++) {
        __m512i product = _mm512_mullo_epi32(states[q], factor);
        __m512i sum = _mm512_mask_dbsad_epu8(magic, 0x55555555u, product, zero, 0);
        w[q] = _mm512_fmadd_ps(_mm512_castsi512_ps(sum), slope, offset);
    }
    for (int32_t q = 0; q < PAIRS; q++) cw[q] = _mm512_mul_ps(w[q], split);
    for (int32_t q = 0; q < PAIRS; q++) w[q] = _mm512_sub_ps(cw[q], w[q]);
    for (int32_t q = 0; q < PAIRS; q++) w[q] = _mm512_sub_ps(cw[q], w[q]);
}

/* The other codebooks: two f16 with exponent fields within 12..15 in each lane, added and rounded to f16. */
INLINE __m512 three_inst_weight(__m512i state, int32_t codebook) {
    __m512i x = codebook == GLM53_CODEBOOK_MCG
                    ? _mm512_mullo_epi32(state, _mm512_set1_epi32((int)0xcbac1fedu))
                    : _mm512_add_epi32(_mm512_mullo_epi32(state, _mm512_set1_epi32(89226354)),
                                       _mm512_set1_epi32(64248484));
    x = _mm512_and_si512(x, _mm512_set1_epi32((int)0x8fff8fffu));
    x = _mm512_xor_si512(x, _mm512_set1_epi32(0x3b603b60));
    __m256i low = _mm512_cvtepi32_epi16(x), high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16));
    __m512 sum = _mm512_add_ps(_mm512_cvtph_ps(low), _mm512_cvtph_ps(high));
    return _mm512_cvtph_ps(_mm512_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
}

INLINE void step_weights(const tile_source *source, const tile_plan *plan, tile_format format,
                         int32_t codebook, int32_t step, __m512 w[PAIRS]) {
    __m512i windows[2], states[PAIRS]; /* one state per 32-bit lane */
    step_windows(source, plan, format, step >> 1, step & 1, windows);
    for (int32_t q = 0; q < PAIRS; q++) {
        states[q] = _mm512_maskz_multishift_epi64_epi8(0x3333333333333333u, plan->shift[q], windows[q >> 1]);
    }
    if (codebook == GLM53_CODEBOOK_MUL1) {
        mul1_weights(states, w);
        return;
    }
    for (int32_t q = 0; q < PAIRS; q++) w[q] = three_inst_weight(states[q], codebook);
}

/* Activations of four rows of k-tile kt: rows 4 s, and 8 more if q is odd. */
INLINE __m512 quad(const float *x, int32_t kt, int32_t s, int32_t q) {
    return _mm512_broadcast_f32x4(_mm_loadu_ps(x + 16 * kt + 4 * s + 8 * (q & 1)));
}

INLINE void add_step(__m512 sums[QUARTERS], const __m512 w[PAIRS], const float *x, int32_t kt, int32_t step) {
    int32_t s = step >> 1, h = step & 1;
    for (int32_t q = 0; q < PAIRS; q++) {
        int32_t quarter = h + 2 * (q >> 1);
        sums[quarter] = _mm512_fmadd_ps(w[q], quad(x, kt, s, q), sums[quarter]);
    }
}

INLINE void flush_exact(const __m512 sums[QUARTERS], float *acc, bool is_first) {
    add_to(acc, _mm512_permutexvar_ps(column_order(), add_partials_ps(sums)), is_first);
}

/* Decode and multiply in registers; rows is a compile-time constant, at most 2. */
INLINE void fused_exact(const glm53_rect *rect, const tile_plan *plan, tile_format format, int32_t rows) {
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            __m512 sums[2][QUARTERS];
            for (int32_t i = 0; i < rows * QUARTERS; i++)
                sums[i / QUARTERS][i % QUARTERS] = _mm512_setzero_ps();
            for (int32_t kt = 0; kt < K_TILES; kt++) {
                tile_source source;
                load_tile(&source, column.first + (size_t)kt * column.stride, plan, format);
#pragma GCC unroll 4
                for (int32_t step = 0; step < TILE_STEPS; step++) {
                    __m512 w[PAIRS];
                    step_weights(&source, plan, format, GLM53_CODEBOOK_MUL1, step, w);
                    for (int32_t r = 0; r < rows; r++) add_step(sums[r], w, block_of(rect, b, r), kt, step);
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
    __m512 w[K_TILES][TILE_STEPS][PAIRS];
} exact_buffer;

INLINE void fill_exact(exact_buffer *buffer, tile_column column, const tile_plan *plan, tile_format format,
                       int32_t codebook) {
    for (int32_t kt = 0; kt < K_TILES; kt++) {
        tile_source source;
        load_tile(&source, column.first + (size_t)kt * column.stride, plan, format);
#pragma GCC unroll 4
        for (int32_t step = 0; step < TILE_STEPS; step++) {
            step_weights(&source, plan, format, codebook, step, buffer->w[kt][step]);
        }
    }
}

/* Rows [r, r + count) times the buffer; count is a compile-time constant, at most 4. */
INLINE void buffered_exact(const glm53_rect *rect, const exact_buffer *buffer, int32_t b, int32_t nt,
                           int32_t r, int32_t count) {
    __m512 sums[4][QUARTERS];
    for (int32_t i = 0; i < count * QUARTERS; i++) sums[i / QUARTERS][i % QUARTERS] = _mm512_setzero_ps();
    for (int32_t kt = 0; kt < K_TILES; kt++) {
#pragma GCC unroll 4
        for (int32_t step = 0; step < TILE_STEPS; step++) {
            for (int32_t i = 0; i < count; i++) {
                add_step(sums[i], buffer->w[kt][step], block_of(rect, b, r + i), kt, step);
            }
        }
    }
    for (int32_t i = 0; i < count; i++) {
        flush_exact(sums[i], acc_of(rect, r + i, nt), b == rect->block_begin);
    }
}

static void decode_exact(exact_buffer *buffer, const glm53_matrix *matrix, tile_column column,
                         const tile_plan *plan) {
    int32_t codebook = matrix->codebook;
    if (codebook == GLM53_CODEBOOK_MUL1 && matrix->bits_x2 == 6) {
        fill_exact(buffer, column, plan, FORMAT_K3, GLM53_CODEBOOK_MUL1);
    } else if (codebook == GLM53_CODEBOOK_MUL1 && matrix->bits_x2 <= 12) {
        fill_exact(buffer, column, plan, FORMAT_LOW, GLM53_CODEBOOK_MUL1);
    } else if (codebook == GLM53_CODEBOOK_MUL1) {
        fill_exact(buffer, column, plan, FORMAT_HIGH, GLM53_CODEBOOK_MUL1);
    } else if (matrix->bits_x2 == 6) {
        fill_exact(buffer, column, plan, FORMAT_K3, codebook);
    } else if (matrix->bits_x2 <= 12) {
        fill_exact(buffer, column, plan, FORMAT_LOW, codebook);
    } else {
        fill_exact(buffer, column, plan, FORMAT_HIGH, codebook);
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

void glm53_avx512_plan(int32_t bits_x2, void *plan) { plan_tiles(plan, bits_x2); }

void glm53_avx512_multiply_exact(const glm53_rect *rect) {
    const tile_plan *plan = rect->plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    if (rect->rows > 2 || rect->matrix->codebook != GLM53_CODEBOOK_MUL1) {
        multiply_buffered_exact(rect, plan);
    } else if (bits_x2 == 6 && rect->rows == 1) {
        fused_exact(rect, plan, FORMAT_K3, 1);
    } else if (bits_x2 == 6) {
        fused_exact(rect, plan, FORMAT_K3, 2);
    } else if (bits_x2 <= 12 && rect->rows == 1) {
        fused_exact(rect, plan, FORMAT_LOW, 1);
    } else if (bits_x2 > 12 && rect->rows == 1) {
        fused_exact(rect, plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_exact(rect, plan);
    }
}

/* Weight w of a step's pair q: its row within the block and its column within the tile. */
void glm53_avx512_decode_block(const glm53_matrix *matrix, int32_t b, float *w) {
    tile_plan plan;
    plan_tiles(&plan, matrix->bits_x2);
    size_t out = (size_t)matrix->out_features;
    const glm53_rect rect = {.matrix = matrix};
    for (int32_t nt = 0; nt < matrix->out_features / GLM53_TILE; nt++) {
        exact_buffer buffer;
        decode_exact(&buffer, matrix, column_at(&rect, b, nt), &plan);
        for (int32_t i = 0; i < K_TILES * TILE_STEPS * PAIRS; i++) {
            int32_t q = i & 3, h = i >> 2 & 1, s = i >> 3 & 1, kt = i >> 4;
            float lanes[16];
            _mm512_storeu_ps(lanes, buffer.w[kt][2 * s + h][q]);
            for (int32_t lane = 0; lane < 16; lane++) {
                int32_t row = 16 * kt + 4 * s + (lane & 3) + 8 * (q & 1);
                int32_t column = 16 * nt + 4 * h + (lane >> 2) + 8 * (q >> 1);
                w[(size_t)row * out + (size_t)column] = lanes[lane];
            }
        }
    }
}

#include "target_end.h"
#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx512;
#endif
