/* From packed tiles to weights in registers. Include it after avx2_begin.h.
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
#ifndef GLM53_AVX2_WEIGHTS_H
#define GLM53_AVX2_WEIGHTS_H

#include "tile_column.h"

enum { GROUPS = 4, PAIRS = 4 };

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

static inline void plan_tiles(tile_plan *plan, int32_t bits_x2) {
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
    /* The word before column 0 is the ring's last one, so it cannot be read in place. */
    const uint8_t *before = g == 0 ? bytes + 80 : bytes - 16;
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)bytes);
    first = _mm_alignr_epi8(first, _mm_loadu_si128((const __m128i *)(const void *)before), 12);
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(bytes + 8));
    __m256i source = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
    __m256i a = _mm256_shuffle_epi8(source, upper), b = _mm256_shuffle_epi8(source, lower);
    states[0] = _mm256_blend_epi16(_mm256_srli_epi32(a, 13), _mm256_slli_epi32(a, 6), 0xaa);
    states[1] = _mm256_blend_epi16(_mm256_srli_epi32(a, 7), _mm256_slli_epi32(a, 12), 0xaa);
    states[2] = _mm256_blend_epi16(_mm256_srli_epi32(a, 1), _mm256_slli_epi32(b, 10), 0xaa);
    states[3] = _mm256_blend_epi16(_mm256_srli_epi32(b, 3), _mm256_slli_epi32(b, 16), 0xaa);
}

/* ---- weights ---- */

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

/* The other codebooks: lo = the even j of a register of states, hi = the odd ones. */
INLINE void three_inst_pair(__m256i states, int32_t codebook, __m256 *lo, __m256 *hi) {
    *lo = three_inst_weight(_mm256_blend_epi16(states, _mm256_setzero_si256(), 0xaa), codebook);
    *hi = three_inst_weight(_mm256_srli_epi32(states, 16), codebook);
}

/* The two functions below take four registers in step, a stage of all four, then the next: one by one, the
 * chain of a weight (about 45 cycles) fills the scheduler with waiting operations. */

/* mul1, in place: the sums of the four bytes of state * 0x83dcd12d, in 16-bit arithmetic. The low half of the
 * product is state * 0xd12d, the high half its carry plus state * 0x83dc. */
INLINE void byte_sums_x4(__m256i s[PAIRS]) {
    const __m256i ones = _mm256_set1_epi8(1);
    const __m256i low_factor = _mm256_set1_epi16((short)0xd12d),
                  high_factor = _mm256_set1_epi16((short)0x83dc);
    __m256i hi[PAIRS], more[PAIRS];
    for (int32_t q = 0; q < PAIRS; q++) hi[q] = _mm256_mulhi_epu16(s[q], low_factor);
    for (int32_t q = 0; q < PAIRS; q++) more[q] = _mm256_mullo_epi16(s[q], high_factor);
    for (int32_t q = 0; q < PAIRS; q++) s[q] = _mm256_mullo_epi16(s[q], low_factor);
    for (int32_t q = 0; q < PAIRS; q++) hi[q] = _mm256_add_epi16(hi[q], more[q]);
    for (int32_t q = 0; q < PAIRS; q++) s[q] = _mm256_maddubs_epi16(s[q], ones);
    for (int32_t q = 0; q < PAIRS; q++) hi[q] = _mm256_maddubs_epi16(hi[q], ones);
    for (int32_t q = 0; q < PAIRS; q++) s[q] = _mm256_add_epi16(s[q], hi[q]);
}

/* The weights of two registers of byte sums: w[0], w[1] = even and odd j of the first, w[2], w[3] of the
 * second.
 *
 * A sum becomes the float 2^23 + sum by exponent bits in its upper half, and one fma takes off the 2^23 and
 * gives the affine value, exactly. The rounding to f16's 11 bits is the one of a Veltkamp split with 2^13 +
 * 1; it equals the f16 fma for all sums (tested through all 65,536 states). Tried and slower: vcvtps2ph and
 * back. */
INLINE void mul1_weights_x4(const __m256i sums[2], __m256 w[4]) {
    const __m256i magic = _mm256_set1_epi16(0x4b00);
    const __m256 slope = _mm256_set1_ps(GLM53_MUL1_SLOPE), split = _mm256_set1_ps(8193.0f);
    const __m256 offset = _mm256_set1_ps(GLM53_MUL1_OFFSET - 8388608.0f * GLM53_MUL1_SLOPE);
    __m256i wide[4];
    __m256 cw[4];
    for (int32_t i = 0; i < 2; i++) wide[2 * i] = _mm256_blend_epi16(sums[i], magic, 0xaa);
    for (int32_t i = 0; i < 2; i++)
        wide[2 * i + 1] = _mm256_blend_epi16(_mm256_srli_epi32(sums[i], 16), magic, 0xaa);
    for (int32_t i = 0; i < 4; i++) w[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(wide[i]), slope, offset);
    for (int32_t i = 0; i < 4; i++) cw[i] = _mm256_mul_ps(w[i], split);
    for (int32_t i = 0; i < 4; i++) w[i] = _mm256_sub_ps(cw[i], w[i]);
    for (int32_t i = 0; i < 4; i++) w[i] = _mm256_sub_ps(cw[i], w[i]);
}

/* ---- products: what is common ---- */

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

/* The chain from packed bits to a weight is about 45 cycles long, more than the schedulers can look ahead. So
 * the kernels run it as a pipeline: a step takes the states of the step before to byte sums while it extracts
 * the next ones. Steps go through the k-tiles of a group, then to the next group; after the last one the
 * pipeline runs idle on the first. */
typedef struct {
    __m256i states[PAIRS];
} states_pipeline;

typedef struct {
    __m256i sums[PAIRS];
    __m256i states[PAIRS];
} sums_pipeline;

/* The states of step `ahead` steps after (g, kt). */
INLINE void states_ahead(tile_column column, const tile_stream *streams, const tile_plan *plan,
                         tile_format format, int32_t g, int32_t kt, int32_t ahead, __m256i states[PAIRS]) {
    int32_t step = (g * K_TILES + kt + ahead) % (GROUPS * K_TILES);
    group_states(column, streams, plan, format, step / K_TILES, step % K_TILES, states);
}

INLINE void start_states(states_pipeline *pipeline, tile_column column, const tile_stream *streams,
                         const tile_plan *plan, tile_format format) {
    states_ahead(column, streams, plan, format, 0, 0, 0, pipeline->states);
}

INLINE void advance_states(states_pipeline *pipeline, tile_column column, const tile_stream *streams,
                           const tile_plan *plan, tile_format format, int32_t g, int32_t kt,
                           __m256i current[PAIRS]) {
    for (int32_t q = 0; q < PAIRS; q++) current[q] = pipeline->states[q];
    states_ahead(column, streams, plan, format, g, kt, 1, pipeline->states);
}

INLINE void start_sums(sums_pipeline *pipeline, tile_column column, const tile_stream *streams,
                       const tile_plan *plan, tile_format format) {
    states_ahead(column, streams, plan, format, 0, 0, 0, pipeline->sums);
    byte_sums_x4(pipeline->sums);
    states_ahead(column, streams, plan, format, 0, 0, 1, pipeline->states);
}

INLINE void advance_sums(sums_pipeline *pipeline, tile_column column, const tile_stream *streams,
                         const tile_plan *plan, tile_format format, int32_t g, int32_t kt,
                         __m256i current[PAIRS]) {
    for (int32_t q = 0; q < PAIRS; q++) {
        current[q] = pipeline->sums[q];
        pipeline->sums[q] = pipeline->states[q];
    }
    byte_sums_x4(pipeline->sums);
    states_ahead(column, streams, plan, format, g, kt, 2, pipeline->states);
}

INLINE void add_to(float *acc, __m256 part, bool is_first) {
    _mm256_storeu_ps(acc, is_first ? part : _mm256_add_ps(_mm256_loadu_ps(acc), part));
}

/* Columns 2g and 2g + 1 stand in the two halves of sums[g]; the result has them in order. */
INLINE __m256i column_order(void) { return _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); }

#endif
