/* AVX2 + FMA + F16C kernels.
 *
 * Layout of a decoded tile. Position t = 8 lane + j of a tile with lane = 4 m + p lies in row 2 p + (j & 1) +
 * 8 (j >> 1 & 1), column m + 8 (j >> 2). One register takes the lanes of two neighbouring m, four p each, and
 * in each 32-bit lane the pair j = 2 q (low half) and 2 q + 1 (high half): two neighbouring rows of one
 * column.
 *
 *     group g = 0..3, pair q = 0..3:   32-bit lane  0   1   2   3  |  4   5   6   7
 *                                      column       2g (+8 if q>1) |  2g + 1 (+8 if q>1)
 *                                      rows         0,1 2,3 4,5 6,7|  0,1 2,3 4,5 6,7   (+8 if q is odd)
 *
 * So two activation registers per tile serve all columns, and a sum has four row-partials per column that are
 * added once per 128 rows. One chain of operations per (row, group, half of the columns), the same for every
 * number of rows: that keeps a row's bits independent of its company.
 */
#include "internal.h"

#ifdef GLM53_HAS_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define INLINE static inline __attribute__((always_inline))

enum { GROUPS = 4, PAIRS = 4, K_TILES = GLM53_BLOCK / GLM53_TILE };

/* ---- states ---- */

/* How packed bits reach the lanes; a compile-time argument of the inlined kernels. */
typedef enum {
    FORMAT_K3,   /* 3 bits: straight from the packed words */
    FORMAT_LOW,  /* up to 4 bits: four lanes' windows lie within 16 bytes */
    FORMAT_HIGH, /* more: two 16-byte loads for four lanes */
} tile_format;

/* For bits other than 3, by pair: where in a tile's byte stream the windows lie and how far to shift them. A
 * window is the 32 bits from the byte in which the state of j = 2 q begins; the state of j + 1 ends within
 * it, too. */
typedef struct {
    __m256i shuffle[PAIRS]
                   [2];     /* lanes p = 0, 1 (or all four) from the first load, p = 2, 3 from the second */
    __m256i right[PAIRS];   /* brings the state of 2 q to bits 0..15 */
    __m256i left[PAIRS];    /* brings the state of 2 q + 1 to bits 16..31 */
    int32_t base[PAIRS][2]; /* first byte of the loads, relative to the first byte of column m; may be -2 */
    int32_t column_bytes;   /* bytes of the four lanes of one m */
} tile_plan;

static int32_t floor_div8(int32_t a) { return a >= 0 ? a / 8 : -((7 - a) / 8); }

static void plan_pair(tile_plan *plan, int32_t bits_x2, bool is_high, int32_t q) {
    uint8_t shuffle[2][16];
    uint32_t right[4], left[4];
    memset(shuffle, 0x80, sizeof shuffle);
    for (int32_t p = 0; p < 4; p++) {
        int32_t start = 4 * bits_x2 * p + ((2 * q + 1) * bits_x2 >> 1) - 16;
        int32_t width = ((2 * q + 2) * bits_x2 >> 1) - ((2 * q + 1) * bits_x2 >> 1);
        int32_t byte = floor_div8(start), offset = start - 8 * byte;
        int32_t source = is_high && p >= 2;
        if (p == 0 || (p == 2 && is_high)) plan->base[q][source] = byte;
        for (int32_t i = 0; i < 4; i++) {
            shuffle[source][4 * p + i] = (uint8_t)(byte - plan->base[q][source] + 3 - i);
        }
        right[p] = (uint32_t)(16 - offset);
        left[p] = (uint32_t)(offset + width);
    }
    for (int32_t source = 0; source < 2; source++) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)shuffle[source]);
        plan->shuffle[q][source] = _mm256_broadcastsi128_si256(half);
    }
    plan->right[q] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)right));
    plan->left[q] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)left));
}

static void plan_tiles(tile_plan *plan, int32_t bits_x2) {
    plan->column_bytes = 2 * bits_x2;
    for (int32_t q = 0; q < PAIRS; q++) plan_pair(plan, bits_x2, bits_x2 > 8, q);
}

/* A tile as a plain byte stream: bytes of each 32-bit word reversed, the end repeated in front. Loads may
 * start 2 bytes before `bytes` and end 16 bytes after its last. */
typedef struct {
    uint8_t wrap[16];
    uint8_t bytes[256];
    uint8_t slack[16];
} tile_stream;

INLINE void fill_stream(tile_stream *stream, const uint16_t *tile, int32_t bits_x2) {
    const __m128i reverse = _mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
    __m128i word = _mm_setzero_si128();
    for (int32_t i = 0; i < bits_x2; i++) { /* a tile is 16 * bits_x2 bytes */
        word = _mm_loadu_si128((const __m128i *)(const void *)(tile + 8 * i));
        word = _mm_shuffle_epi8(word, reverse);
        _mm_storeu_si128((__m128i *)(void *)(stream->bytes + 16 * i), word);
    }
    _mm_storeu_si128((__m128i *)(void *)stream->wrap, word);
}

INLINE __m256i load_halves(const uint8_t *low, const uint8_t *high) {
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)low);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                   _mm_loadu_si128((const __m128i *)(const void *)high), 1);
}

/* The states of pair q of group g. */
INLINE __m256i stream_states(const tile_stream *stream, const tile_plan *plan, tile_format format, int32_t g,
                             int32_t q) {
    const uint8_t *column = stream->bytes + 2 * g * plan->column_bytes;
    const uint8_t *low = column + plan->base[q][0];
    __m256i window = _mm256_shuffle_epi8(load_halves(low, low + plan->column_bytes), plan->shuffle[q][0]);
    if (format == FORMAT_HIGH) {
        const uint8_t *high = column + plan->base[q][1];
        __m256i rest = load_halves(high, high + plan->column_bytes);
        window = _mm256_or_si256(window, _mm256_shuffle_epi8(rest, plan->shuffle[q][1]));
    }
    return _mm256_blend_epi16(_mm256_srlv_epi32(window, plan->right[q]),
                              _mm256_sllv_epi32(window, plan->left[q]), 0xaa);
}

/* K = 3: the 40 bits that the eight states of a lane need start at a byte, so one register holds their upper,
 * one their lower 32 bits for eight lanes; the shifts are the same for all lanes. A column m is words 3 m - 1
 * .. 3 m + 2. */
INLINE void k3_states(const uint16_t *tile, int32_t g, __m256i states[PAIRS]) {
    const __m256i upper =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(6, 7, 0, 1, 11, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 8));
    const __m256i lower =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(5, 6, 7, 0, 10, 11, 4, 5, 15, 8, 9, 10, 12, 13, 14, 15));
    const uint8_t *bytes = (const uint8_t *)tile + 24 * g;
    __m128i first;
    if (g == 0) { /* the ring: word 23 comes before word 0 */
        __m128i start = _mm_loadu_si128((const __m128i *)(const void *)bytes);
        __m128i end = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 80));
        first = _mm_alignr_epi8(start, end, 12);
    } else {
        first = _mm_loadu_si128((const __m128i *)(const void *)(bytes - 4));
    }
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 8));
    __m256i source = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    __m256i a = _mm256_shuffle_epi8(source, upper), b = _mm256_shuffle_epi8(source, lower);
    states[0] = _mm256_blend_epi16(_mm256_srli_epi32(a, 13), _mm256_slli_epi32(a, 6), 0xaa);
    states[1] = _mm256_blend_epi16(_mm256_srli_epi32(a, 7), _mm256_slli_epi32(a, 12), 0xaa);
    states[2] = _mm256_blend_epi16(_mm256_srli_epi32(a, 1), _mm256_slli_epi32(b, 10), 0xaa);
    states[3] = _mm256_blend_epi16(_mm256_srli_epi32(b, 3), _mm256_slli_epi32(b, 16), 0xaa);
}

/* ---- weights ---- */

/* mul1: the sum of the four bytes of state * 0x83dcd12d in 16-bit arithmetic: the low half of the product is
 * lo, the high half the carry out of state * 0xd12d plus state * 0x83dc. */
INLINE __m256i byte_sums(__m256i states) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i low_factor = _mm256_set1_epi16((short)0xd12d),
                  high_factor = _mm256_set1_epi16((short)0x83dc);
    __m256i lo = _mm256_mullo_epi16(states, low_factor);
    __m256i hi =
        _mm256_add_epi16(_mm256_mulhi_epu16(states, low_factor), _mm256_mullo_epi16(states, high_factor));
    return _mm256_add_epi16(_mm256_maddubs_epi16(lo, ones), _mm256_maddubs_epi16(hi, ones));
}

/* A byte sum as its weight. The affine value is exact in float32; the rounding to f16's 11 bits is the one of
 * a Veltkamp split, c = 2^13 + 1, with c * slope and c * offset exact as well. Equal to the f16 fma for all
 * 1021 sums (tested through all 65,536 states). */
INLINE __m256 mul1_weight(__m256i sum) {
    __m256 h = _mm256_cvtepi32_ps(sum);
    __m256 w = _mm256_fmadd_ps(h, _mm256_set1_ps(GLM53_MUL1_SLOPE), _mm256_set1_ps(GLM53_MUL1_OFFSET));
    __m256 cw = _mm256_fmadd_ps(h, _mm256_set1_ps(8193.0f * GLM53_MUL1_SLOPE),
                                _mm256_set1_ps(8193.0f * GLM53_MUL1_OFFSET));
    return _mm256_sub_ps(cw, _mm256_sub_ps(cw, w));
}

/* Two f16 with exponent fields within 12..15 in each lane, added and rounded to f16. */
INLINE __m256 add_halves(__m256i x) {
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u), rest = _mm256_set1_epi32(0x7fff << 13);
    const __m256i bias = _mm256_set1_epi32(112 << 23);
    __m256i lo = _mm256_slli_epi32(x, 16);
    __m256i lo_float = _mm256_add_epi32(_mm256_and_si256(_mm256_slli_epi32(x, 13), rest), bias);
    __m256i hi_float = _mm256_add_epi32(_mm256_and_si256(_mm256_srli_epi32(x, 3), rest), bias);
    __m256 a = _mm256_castsi256_ps(_mm256_or_si256(lo_float, _mm256_and_si256(lo, sign)));
    __m256 b = _mm256_castsi256_ps(_mm256_or_si256(hi_float, _mm256_and_si256(x, sign)));
    return _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_add_ps(a, b), _MM_FROUND_TO_NEAREST_INT));
}

INLINE __m256 three_inst_weight(__m256i state, int32_t codebook) {
    __m256i x = codebook == GLM53_CODEBOOK_MCG
                    ? _mm256_mullo_epi32(state, _mm256_set1_epi32((int)0xcbac1fedu))
                    : _mm256_add_epi32(_mm256_mullo_epi32(state, _mm256_set1_epi32(89226354)),
                                       _mm256_set1_epi32(64248484));
    x = _mm256_and_si256(x, _mm256_set1_epi32((int)0x8fff8fffu));
    return add_halves(_mm256_xor_si256(x, _mm256_set1_epi32(0x3b603b60)));
}

/* The weights of a register of states: lo = the even j (low halves), hi = the odd ones. */
INLINE void pair_weights(__m256i states, int32_t codebook, __m256 *lo, __m256 *hi) {
    const __m256i zero = _mm256_setzero_si256();
    if (codebook == GLM53_CODEBOOK_MUL1) {
        __m256i sums = byte_sums(states);
        *lo = mul1_weight(_mm256_blend_epi16(sums, zero, 0xaa));
        *hi = mul1_weight(_mm256_srli_epi32(sums, 16));
    } else {
        *lo = three_inst_weight(_mm256_blend_epi16(states, zero, 0xaa), codebook);
        *hi = three_inst_weight(_mm256_srli_epi32(states, 16), codebook);
    }
}

/* ---- products: what is common ---- */

/* The eight packed tiles of one 128-block of k in one column of tiles. */
typedef struct {
    const uint16_t *first;
    size_t stride; /* halves from one k-tile to the next */
} tile_column;

INLINE tile_column column_at(const glm53_rect *rect, int32_t b, int32_t nt) {
    size_t halves = glm53_tile_halves(rect->matrix);
    size_t num_tiles = (size_t)(rect->matrix->out_features / GLM53_TILE);
    tile_column column = {.stride = num_tiles * halves};
    column.first = rect->matrix->trellis + (size_t)b * K_TILES * column.stride + (size_t)nt * halves;
    return column;
}

/* Runs of tiles are read by eight streams at once, one per k-tile; the hardware follows them only in part. */
enum { PREFETCH_BYTES = 768 };

INLINE void prefetch_column(tile_column column, size_t tile_bytes) {
    for (size_t i = 0; i < K_TILES; i++) {
        const char *ahead = (const char *)(column.first + i * column.stride) + PREFETCH_BYTES;
        for (size_t at = 0; at < tile_bytes; at += 64) _mm_prefetch(ahead + at, _MM_HINT_T0);
    }
}

INLINE void fill_streams(tile_stream streams[K_TILES], tile_column column, int32_t bits_x2) {
    for (size_t i = 0; i < K_TILES; i++) fill_stream(&streams[i], column.first + i * column.stride, bits_x2);
}

INLINE void group_states(tile_column column, const tile_stream *streams, const tile_plan *plan,
                         tile_format format, int32_t g, int32_t kt, __m256i states[PAIRS]) {
    if (format == FORMAT_K3) {
        k3_states(column.first + (size_t)kt * column.stride, g, states);
        return;
    }
    for (int32_t q = 0; q < PAIRS; q++) states[q] = stream_states(&streams[kt], plan, format, g, q);
}

INLINE const float *block_of(const glm53_rect *rect, int32_t b, int32_t r) {
    return rect->x + ((size_t)b * (size_t)rect->rows + (size_t)r) * GLM53_X_FLOATS;
}

INLINE float *acc_of(const glm53_rect *rect, int32_t r, int32_t nt) {
    return rect->acc + (size_t)r * rect->acc_stride + (size_t)(nt - rect->tile_begin) * GLM53_TILE;
}

INLINE void add_to(float *acc, __m256 part, bool is_first) {
    _mm256_storeu_ps(acc, is_first ? part : _mm256_add_ps(_mm256_loadu_ps(acc), part));
}

/* Columns 2g and 2g + 1 stand in the two halves of sums[g]; the result has them in order. */
INLINE __m256i column_order(void) { return _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); }

/* ---- products: exact32 ---- */

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
            prefetch_column(column, 2 * glm53_tile_halves(rect->matrix));
            if (format != FORMAT_K3) fill_streams(streams, column, rect->matrix->bits_x2);
            __m256 sums[2][2 * GROUPS];
            for (int32_t g = 0; g < GROUPS; g++) {
                __m256 s[2][2] = {{_mm256_setzero_ps(), _mm256_setzero_ps()},
                                  {_mm256_setzero_ps(), _mm256_setzero_ps()}};
                for (int32_t kt = 0; kt < K_TILES; kt++) {
                    __m256i states[PAIRS];
                    group_states(column, streams, plan, format, g, kt, states);
                    for (int32_t q = 0; q < PAIRS; q++) {
                        __m256 lo, hi;
                        pair_weights(states[q], GLM53_CODEBOOK_MUL1, &lo, &hi);
                        for (int32_t r = 0; r < rows; r++) {
                            const float *x = block_of(rect, b, r) + 16 * kt + 8 * (q & 1);
                            s[r][q >> 1] = _mm256_fmadd_ps(lo, quad(x), s[r][q >> 1]);
                            s[r][q >> 1] = _mm256_fmadd_ps(hi, quad(x + 4), s[r][q >> 1]);
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
            for (int32_t q = 0; q < PAIRS; q++) {
                __m256 *w = buffer->w[g][kt][q];
                pair_weights(states[q], codebook, &w[0], &w[1]);
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
            prefetch_column(column, 2 * glm53_tile_halves(rect->matrix));
            decode_exact(&buffer, rect->matrix, column, plan);
            int32_t r = 0;
            for (; r + 4 <= rect->rows; r += 4) buffered_exact(rect, &buffer, b, nt, r, 4);
            for (; r + 2 <= rect->rows; r += 2) buffered_exact(rect, &buffer, b, nt, r, 2);
            if (r < rect->rows) buffered_exact(rect, &buffer, b, nt, r, 1);
        }
    }
}

static void multiply_exact(const glm53_rect *rect) {
    tile_plan plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    plan_tiles(&plan, bits_x2);
    if (rect->rows > 2 || rect->matrix->codebook != GLM53_CODEBOOK_MUL1) {
        multiply_buffered_exact(rect, &plan);
    } else if (bits_x2 == 6) {
        if (rect->rows == 1) {
            fused_exact(rect, &plan, FORMAT_K3, 1);
        } else {
            fused_exact(rect, &plan, FORMAT_K3, 2);
        }
    } else if (bits_x2 <= 8 && rect->rows == 1) {
        fused_exact(rect, &plan, FORMAT_LOW, 1);
    } else if (bits_x2 > 8 && rect->rows == 1) {
        fused_exact(rect, &plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_exact(rect, &plan);
    }
}

/* ---- products: fast16 ---- */

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

INLINE const glm53_fast_block *fast_block_of(const glm53_rect *rect, int32_t b, int32_t r) {
    return (const glm53_fast_block *)(const void *)block_of(rect, b, r);
}

INLINE __m256i octet(const int16_t *q) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)q));
}

INLINE void fused_fast(const glm53_rect *rect, const tile_plan *plan, tile_format format, int32_t rows) {
    tile_stream streams[K_TILES];
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt++) {
            tile_column column = column_at(rect, b, nt);
            prefetch_column(column, 2 * glm53_tile_halves(rect->matrix));
            if (format != FORMAT_K3) fill_streams(streams, column, rect->matrix->bits_x2);
            __m256i sums[2][2 * GROUPS];
            for (int32_t g = 0; g < GROUPS; g++) {
                __m256i s[2][2] = {{_mm256_setzero_si256(), _mm256_setzero_si256()},
                                   {_mm256_setzero_si256(), _mm256_setzero_si256()}};
                for (int32_t kt = 0; kt < K_TILES; kt++) {
                    __m256i states[PAIRS];
                    group_states(column, streams, plan, format, g, kt, states);
                    for (int32_t q = 0; q < PAIRS; q++) {
                        __m256i w = byte_sums(states[q]);
                        for (int32_t r = 0; r < rows; r++) {
                            __m256i x = octet(fast_block_of(rect, b, r)->q + 16 * kt + 8 * (q & 1));
                            s[r][q >> 1] = _mm256_add_epi32(s[r][q >> 1], _mm256_madd_epi16(w, x));
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
            for (int32_t q = 0; q < PAIRS; q++) buffer->w[g][kt][q] = byte_sums(states[q]);
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
            prefetch_column(column, 2 * glm53_tile_halves(rect->matrix));
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

static void multiply_fast(const glm53_rect *rect) {
    tile_plan plan;
    int32_t bits_x2 = rect->matrix->bits_x2;
    plan_tiles(&plan, bits_x2);
    if (rect->rows > 2) {
        multiply_buffered_fast(rect, &plan);
    } else if (bits_x2 == 6) {
        if (rect->rows == 1) {
            fused_fast(rect, &plan, FORMAT_K3, 1);
        } else {
            fused_fast(rect, &plan, FORMAT_K3, 2);
        }
    } else if (bits_x2 <= 8 && rect->rows == 1) {
        fused_fast(rect, &plan, FORMAT_LOW, 1);
    } else if (bits_x2 > 8 && rect->rows == 1) {
        fused_fast(rect, &plan, FORMAT_HIGH, 1);
    } else {
        multiply_buffered_fast(rect, &plan);
    }
}

static bool has_fast16(const glm53_matrix *matrix) { return matrix->codebook == GLM53_CODEBOOK_MUL1; }

static void decode_block(const glm53_matrix *matrix, int32_t b, float *w) {
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

/* ---- Hadamard and what stands around a product ---- */

enum { VECTORS = GLM53_BLOCK / 8 };

INLINE void transform(__m256 v[VECTORS]) {
    const __m256 sign4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    const __m256 sign2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 sign1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 scale = _mm256_set1_ps(0.08838834764831845f); /* 1 / sqrt(128) */
    for (int32_t i = 0; i < VECTORS; i++) {
        __m256 a = v[i];
        a = _mm256_fmadd_ps(a, sign1, _mm256_permute_ps(a, 0xb1));
        a = _mm256_fmadd_ps(a, sign2, _mm256_permute_ps(a, 0x4e));
        v[i] = _mm256_fmadd_ps(a, sign4, _mm256_permute2f128_ps(a, a, 1));
    }
    for (int32_t width = 1; width < VECTORS; width *= 2) {
        for (int32_t i = 0; i < VECTORS; i++) {
            if (i & width) continue;
            __m256 p = v[i], q = v[i + width];
            v[i] = _mm256_add_ps(p, q);
            v[i + width] = _mm256_sub_ps(p, q);
        }
    }
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_mul_ps(v[i], scale);
}

static void hadamard(const float *x, float *y) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_loadu_ps(x + 8 * i);
    transform(v);
    for (int32_t i = 0; i < VECTORS; i++) _mm256_storeu_ps(y + 8 * i, v[i]);
}

INLINE __m256 load_f16(const uint16_t *h) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h));
}

/* Rows 0..7 of a tile as the quads (0, 2, 4, 6), (1, 3, 5, 7). */
INLINE __m256 even_odd(__m256 v) {
    return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

INLINE void quantise(const __m256 v[VECTORS], glm53_fast_block *block) {
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 largest = _mm256_setzero_ps();
    for (int32_t i = 0; i < VECTORS; i++) largest = _mm256_max_ps(largest, _mm256_and_ps(v[i], no_sign));
    float lanes[8], max = 0.0f;
    _mm256_storeu_ps(lanes, largest);
    for (int32_t i = 0; i < 8; i++) max = lanes[i] > max ? lanes[i] : max;
    const __m256 inverse = _mm256_set1_ps(max > 0.0f ? GLM53_FAST_MAX / max : 0.0f);
    __m256i sum = _mm256_setzero_si256();
    for (int32_t i = 0; i < VECTORS; i += 2) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], inverse));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256((__m256i *)(void *)(block->q + 8 * i), packed);
    }
    int32_t parts[8], total = 0;
    _mm256_storeu_si256((__m256i *)(void *)parts, sum);
    for (int32_t i = 0; i < 8; i++) total += parts[i];
    float scale = max / GLM53_FAST_MAX;
    block->slope = scale * GLM53_MUL1_SLOPE;
    block->offset = scale * GLM53_MUL1_OFFSET * (float)total;
}

static void prepare(const float *x, const uint16_t *suh, int32_t precision, float *block) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) {
        v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), load_f16(suh + 8 * i));
    }
    transform(v);
    if (precision == GLM53_FAST16) {
        quantise(v, (glm53_fast_block *)(void *)block);
    } else {
        for (int32_t i = 0; i < VECTORS; i++) _mm256_storeu_ps(block + 8 * i, even_odd(v[i]));
    }
}

static void finish(const float *parts, int32_t num_parts, size_t stride, const uint16_t *svh,
                   const uint16_t *bias, float *y) {
    __m256 v[VECTORS];
    for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_loadu_ps(parts + 8 * i);
    for (int32_t p = 1; p < num_parts; p++) {
        const float *part = parts + (size_t)p * stride;
        for (int32_t i = 0; i < VECTORS; i++) v[i] = _mm256_add_ps(v[i], _mm256_loadu_ps(part + 8 * i));
    }
    transform(v);
    for (int32_t i = 0; i < VECTORS; i++) {
        __m256 scaled = _mm256_mul_ps(v[i], load_f16(svh + 8 * i));
        if (bias) scaled = _mm256_add_ps(scaled, load_f16(bias + 8 * i));
        _mm256_storeu_ps(y + 8 * i, scaled);
    }
}

/* e^x within 2 units in the last place for x in [-87, 88], saturating outside. x = n ln 2 + r with |r| <= ln
 * 2 / 2; the Taylor sum to r^7 leaves 5e-9. ln 2 is taken in two parts, the first with zeros enough for n
 * times it to be exact. */
INLINE __m256 exp_ps(__m256 x) {
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(exponent));
}

INLINE __m256 silu_ps(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 e = exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), x));
    return _mm256_div_ps(x, _mm256_add_ps(one, e));
}

static void activate(const float *gate, const float *up, float limit, int32_t clamp, float *a) {
    const __m256 top = _mm256_set1_ps(limit), bottom = _mm256_set1_ps(-limit);
    for (int32_t i = 0; i < GLM53_BLOCK; i += 8) {
        __m256 g = _mm256_loadu_ps(gate + i), u = _mm256_loadu_ps(up + i);
        if (limit > 0.0f) u = _mm256_min_ps(top, _mm256_max_ps(bottom, u));
        if (limit > 0.0f && clamp == GLM53_CLAMP_GATE) g = _mm256_min_ps(top, g);
        g = silu_ps(g);
        if (limit > 0.0f && clamp == GLM53_CLAMP_ACTIVATION) g = _mm256_min_ps(top, g);
        _mm256_storeu_ps(a + i, _mm256_mul_ps(g, u));
    }
}

static void add_scaled(float *y, const float *x, float scale, int32_t n) {
    const __m256 factor = _mm256_set1_ps(scale);
    for (int32_t i = 0; i < n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(_mm256_loadu_ps(x + i), factor, _mm256_loadu_ps(y + i)));
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const glm53_tier glm53_tier_avx2 = {
    .isa = GLM53_ISA_AVX2,
    .has_fast16 = has_fast16,
    .decode_block = decode_block,
    .hadamard = hadamard,
    .prepare = prepare,
    .multiply_exact = multiply_exact,
    .multiply_fast = multiply_fast,
    .finish = finish,
    .activate = activate,
    .add_scaled = add_scaled,
};

#else
/* An empty translation unit is not C. */
typedef int glm53_no_avx2;
#endif
