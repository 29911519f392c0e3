/* AVX-512: products of byte sums with 16-bit activations (codebook mul1). Integer sums over a block are
 * exact, so the results equal the ones of AVX2 bit for bit. */
#include "exl3_avx512.h"

#ifdef GLM53_HAS_X86
#include "avx512_begin.h"
#include "avx512_weights.h"

/* The 64 states of a step as 16-bit lanes: rows r and r + 8 of a column in the halves of a 32-bit lane.
 * states[0] is for quarter h, states[1] for quarter h + 2. */
INLINE void step_states(const tile_source *source, const tile_plan *plan, tile_format format, int32_t step,
                        __m512i states[2]) {
    __m512i windows[2];
    step_windows(source, plan, format, step >> 1, step & 1, windows);
    for (int32_t i = 0; i < 2; i++) states[i] = _mm512_multishift_epi64_epi8(plan->shift[2 * i], windows[i]);
}

/* In place: the sums of the four bytes of state * 0x83dcd12d, in 16-bit arithmetic as in avx2_weights.h.
 *
 * Tried: vpmulld of 32-bit states and vdbpsadbw, which sums four bytes at once: 15 to 17 instructions for 64
 * weights instead of 19, up to 10 per cent faster on Zen 4 (17, half of the states by shifts). But Intel
 * takes two operations for vpmulld and has one port for vdbpsadbw: there llvm-mca 16 reckons 24 to 30 per
 * cent more cycles (icelake-server, sapphirerapids; not run). */
INLINE void byte_sums(__m512i s[2]) {
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i low_factor = _mm512_set1_epi16((short)0xd12d),
                  high_factor = _mm512_set1_epi16((short)0x83dc);
    for (int32_t i = 0; i < 2; i++) {
        __m512i low = _mm512_mullo_epi16(s[i], low_factor);
        __m512i high =
            _mm512_add_epi16(_mm512_mulhi_epu16(s[i], low_factor), _mm512_mullo_epi16(s[i], high_factor));
        s[i] = _mm512_add_epi16(_mm512_maddubs_epi16(low, ones), _mm512_maddubs_epi16(high, ones));
    }
}

/* Activations of rows 4 s .. 4 s + 3 and 8 more of k-tile kt, in the order that prepare gave them. */
INLINE __m512i octet(const glm53_fast_block *block, int32_t kt, int32_t s) {
    const void *q = block->q + 16 * kt + 8 * s;
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)q));
}

/* The integer sum of a block fits: 128 * 1005 * 16383 < 2^31. */
INLINE void flush_fast(const __m512i sums[QUARTERS], const glm53_fast_block *block, float *acc,
                       bool is_first) {
    __m512i columns = _mm512_permutexvar_epi32(column_order(), add_partials(sums));
    __m512 part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(columns), _mm512_set1_ps(block->slope),
                                  _mm512_set1_ps(block->offset));
    add_to(acc, part, is_first);
}

/* Decode and multiply in registers; rows is a compile-time constant, at most 3: with four, the sums do not
 * fit the registers, and the buffer is faster. */
INLINE void fused_fast(const glm53_rect *rect, const tile_plan *plan, tile_format format, int32_t rows) {
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_ahead(rect, b, nt);
            __m512i sums[3][QUARTERS];
            for (int32_t i = 0; i < rows * QUARTERS; i++) {
                sums[i / QUARTERS][i % QUARTERS] = _mm512_setzero_si512();
            }
            for (int32_t kt = 0; kt < K_TILES; kt++) {
                tile_source source;
                load_tile(&source, column.first + (size_t)kt * column.stride, plan, format);
#pragma GCC unroll 4
                for (int32_t step = 0; step < TILE_STEPS; step++) {
                    int32_t s = step >> 1, h = step & 1;
                    __m512i w[2];
                    step_states(&source, plan, format, step, w);
                    byte_sums(w);
                    for (int32_t r = 0; r < rows; r++) {
                        __m512i x = octet(fast_block_of(rect, b, r), kt, s);
                        sums[r][h] = _mm512_dpwssd_epi32(sums[r][h], w[0], x);
                        sums[r][h + 2] = _mm512_dpwssd_epi32(sums[r][h + 2], w[1], x);
                    }
                }
            }
            for (int32_t r = 0; r < rows; r++) {
                flush_fast(sums[r], fast_block_of(rect, b, r), acc_of(rect, r, nt), b == rect->block_begin);
            }
        }
    }
}

/* One block of one column of tiles as byte sums: 4 KiB. */
typedef struct {
    __m512i w[K_TILES][TILE_STEPS][2];
} fast_buffer;

INLINE void fill_fast(fast_buffer *buffer, tile_column column, const tile_plan *plan, tile_format format) {
    for (int32_t kt = 0; kt < K_TILES; kt++) {
        tile_source source;
        load_tile(&source, column.first + (size_t)kt * column.stride, plan, format);
#pragma GCC unroll 4
        for (int32_t step = 0; step < TILE_STEPS; step++) {
            step_states(&source, plan, format, step, buffer->w[kt][step]);
            byte_sums(buffer->w[kt][step]);
        }
    }
}

/* Rows [r, r + count) times the buffer; count is a compile-time constant, at most 4. */
INLINE void buffered_fast(const glm53_rect *rect, const fast_buffer *buffer, int32_t b, int32_t nt, int32_t r,
                          int32_t count) {
    __m512i sums[4][QUARTERS];
    for (int32_t i = 0; i < count * QUARTERS; i++) {
        sums[i / QUARTERS][i % QUARTERS] = _mm512_setzero_si512();
    }
    for (int32_t kt = 0; kt < K_TILES; kt++) {
#pragma GCC unroll 4
        for (int32_t step = 0; step < TILE_STEPS; step++) {
            int32_t s = step >> 1, h = step & 1;
            for (int32_t i = 0; i < count; i++) {
                __m512i x = octet(fast_block_of(rect, b, r + i), kt, s);
                sums[i][h] = _mm512_dpwssd_epi32(sums[i][h], buffer->w[kt][step][0], x);
                sums[i][h + 2] = _mm512_dpwssd_epi32(sums[i][h + 2], buffer->w[kt][step][1], x);
            }
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
                fill_fast(&buffer, column, plan, FORMAT_K3);
            } else if (rect->matrix->bits_x2 <= 12) {
                fill_fast(&buffer, column, plan, FORMAT_LOW);
            } else {
                fill_fast(&buffer, column, plan, FORMAT_HIGH);
            }
            int32_t r = 0;
            for (; r + 4 <= rect->rows; r += 4) buffered_fast(rect, &buffer, b, nt, r, 4);
            for (; r + 2 <= rect->rows; r += 2) buffered_fast(rect, &buffer, b, nt, r, 2);
            if (r < rect->rows) buffered_fast(rect, &buffer, b, nt, r, 1);
        }
    }
}

void glm53_avx512_multiply_fast(const glm53_rect *rect) {
    const tile_plan *plan = rect->plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    if (bits_x2 == 6 && rect->rows == 1) {
        fused_fast(rect, plan, FORMAT_K3, 1);
    } else if (bits_x2 == 6 && rect->rows == 2) {
        fused_fast(rect, plan, FORMAT_K3, 2);
    } else if (bits_x2 == 6 && rect->rows == 3) {
        fused_fast(rect, plan, FORMAT_K3, 3);
    } else if (rect->rows == 1 && bits_x2 <= 12) {
        fused_fast(rect, plan, FORMAT_LOW, 1);
    } else if (rect->rows == 1) {
        fused_fast(rect, plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_fast(rect, plan);
    }
}

#include "target_end.h"
#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx512;
#endif
