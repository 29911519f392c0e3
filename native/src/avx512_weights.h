/* From packed tiles to weights in 512-bit registers. Include it after avx512_begin.h.
 *
 * A lane's bits (see avx2_weights.h for the tile's layout) are gathered into one 64-bit window by vpermb, and
 * vpmultishiftqb takes up to four states out of it at once, wherever they begin. Step (s, h) with s, h = 0, 1
 * decodes 64 weights: rows 4s .. 4s + 3 and 8 more of columns 4h .. 4h + 3 and 8 more. It gives one register
 * for each pair q of states (two pairs share one where 16 bits per state suffice):
 *
 *     32-bit lane    0 .. 3             4 .. 7     8 .. 11    12 .. 15
 *     column         4h                 4h + 1     4h + 2     4h + 3     (+8 if q > 1)
 *     rows           4s .. 4s + 3       the same                         (+8 if q is odd)
 *
 * So one 128-bit activation operand, repeated, serves a whole register, and a sum of four columns has four
 * row-partials per column that are added once per 128 rows. A row has four such sums, one for each quarter of
 * the tile's columns (h, and h + 2 for q > 1), and each is one chain of operations, the same for every number
 * of rows: that keeps a row's bits independent of its company.
 */
#ifndef GLM53_AVX512_WEIGHTS_H
#define GLM53_AVX512_WEIGHTS_H

#include "tile_column.h"

enum { GROUPS = 4, PAIRS = 4, STEPS = 2, QUARTERS = 4, TILE_STEPS = 2 * STEPS };

/* How packed bits reach the windows; a compile-time argument of the inlined kernels. */
typedef enum {
    FORMAT_K3,   /* 3 bits: 64 bytes hold what the lanes of half a tile need */
    FORMAT_LOW,  /* up to 6 bits: 64 bytes for eight lanes, a lane's eight states lie within 64 bits */
    FORMAT_HIGH, /* 7 and 8: the second four states of a lane need a window of their own */
} tile_format;

/* Where in a source register the windows lie, and where in a window the states. */
typedef struct {
    __m512i index[STEPS][2]; /* FORMAT_K3: of step (s, h); else of step s and window w */
    __m512i shift[PAIRS];    /* first bit of each byte of the states: of pair q in the lower halves of 32-bit
                                lanes and, for even q, of pair q + 1 in the upper halves */
    __mmask16 words;         /* 32-bit words to load for eight lanes with the word before them */
    __mmask16 own_words;     /* and without it */
    size_t group_halves;     /* from the first lane of a group of eight lanes to the next group's */
} tile_plan;

static int32_t floor_div8(int32_t a) { return a >= 0 ? a / 8 : -((7 - a) / 8); }

/* First byte of the window of lane p for states 4 w .. 4 w + 7, relative to the lane's column. */
static int32_t window_byte(int32_t bits_x2, int32_t p, int32_t w) {
    return floor_div8(4 * bits_x2 * p + ((4 * w + 1) * bits_x2 >> 1) - 16);
}

/* Where vpermb finds the windows of eight lanes: four columns of p = 2 s and 2 s + 1. Byte n of a tile's
 * stream lies in register byte (origin + n) ^ 3, since the stream's words are most significant byte first. A
 * window's last bytes may lie outside of the register; no state has a bit there. */
static __m512i window_index(int32_t bits_x2, int32_t s, int32_t w, int32_t origin, int32_t num_columns) {
    uint8_t index[64];
    for (int32_t i = 0; i < 64; i++) {
        int32_t column = (i >> 4) % num_columns, p = 2 * s + (i >> 3 & 1);
        int32_t at = origin + 2 * bits_x2 * column + window_byte(bits_x2, p, w) + 7 - (i & 7);
        index[i] = (uint8_t)((at ^ 3) & 63);
    }
    return _mm512_loadu_si512(index);
}

static __m512i pair_shift(int32_t bits_x2, int32_t q, int32_t w) {
    uint8_t shift[64];
    for (int32_t i = 0; i < 64; i++) {
        int32_t p = i >> 3 & 1; /* a lane two further on begins at the same bit of a byte */
        int32_t j = 2 * q + (i >> 2 & 1) + (i & 2);
        int32_t end = 4 * bits_x2 * p + ((j + 1) * bits_x2 >> 1) - 8 * window_byte(bits_x2, p, w);
        shift[i] = (uint8_t)(64 - end + 8 * (i & 1));
    }
    return _mm512_loadu_si512(shift);
}

static inline void plan_tiles(tile_plan *plan, int32_t bits_x2) {
    bool is_k3 = bits_x2 == 6, is_high = bits_x2 > 12;
    for (int32_t s = 0; s < STEPS; s++) {
        /* Sources, see load_tile: K = 3 from 4 bytes before the tile, and from byte 32, where column 4 is
         * byte 48; else from 4 bytes before a group, and for the second window from its first byte. */
        plan->index[s][0] = window_index(bits_x2, s, 0, 4, is_k3 ? 4 : 2);
        plan->index[s][1] =
            is_k3 ? window_index(bits_x2, s, 0, 48 - 32, 4) : window_index(bits_x2, s, 1, 0, 2);
    }
    for (int32_t q = 0; q < PAIRS; q++) plan->shift[q] = pair_shift(bits_x2, q, is_high && q > 1);
    plan->words = (__mmask16)((1u << (bits_x2 < 15 ? bits_x2 + 1 : 16)) - 1);
    plan->own_words = (__mmask16)((1u << bits_x2) - 1);
    plan->group_halves = 2 * (size_t)bits_x2;
}

/* A tile in registers. FORMAT_K3: groups[0] and [1] for its halves; else one for each group of eight lanes
 * and, if FORMAT_HIGH, ends for their second windows. */
typedef struct {
    __m512i groups[GROUPS], ends[GROUPS];
} tile_source;

/* The word before the first one is the ring's last, so it cannot be read in place. */
INLINE void load_tile(tile_source *source, const uint16_t *tile, const tile_plan *plan, tile_format format) {
    if (format == FORMAT_K3) {
        __m512i first = _mm512_loadu_si512(tile), last = _mm512_loadu_si512(tile + 16);
        source->groups[0] = _mm512_alignr_epi32(first, last, 15);
        source->groups[1] = last;
        return;
    }
    int32_t before;
    memcpy(&before, tile + GROUPS * plan->group_halves - 2, sizeof before);
    for (size_t g = 0; g < GROUPS; g++) {
        const uint16_t *group = tile + g * plan->group_halves;
        __m512i own = _mm512_maskz_loadu_epi32(plan->own_words, group);
        source->ends[g] = own;
        source->groups[g] = g == 0 ? _mm512_alignr_epi32(own, _mm512_set1_epi32(before), 15)
                                   : _mm512_maskz_loadu_epi32(plan->words, group - 2);
    }
}

/* Groups 2 h and 2 h + 1 give two columns each. */
INLINE __m512i join(__m512i index, const __m512i sources[2]) {
    __m512i low = _mm512_permutexvar_epi8(index, sources[0]);
    return _mm512_mask_permutexvar_epi8(low, 0xffffffff00000000u, index, sources[1]);
}

/* What the states of step (s, h) are to be taken from: windows[i] has pairs 2 i and 2 i + 1. */
INLINE void step_windows(const tile_source *source, const tile_plan *plan, tile_format format, int32_t s,
                         int32_t h, __m512i windows[2]) {
    if (format == FORMAT_K3) {
        windows[0] = windows[1] = _mm512_permutexvar_epi8(plan->index[s][h], source->groups[h]);
        return;
    }
    windows[0] = windows[1] = join(plan->index[s][0], source->groups + 2 * h);
    if (format == FORMAT_HIGH) windows[1] = join(plan->index[s][1], source->ends + 2 * h);
}

/* ---- sums of a row ---- */

/* Four sums of four columns with four partials each, in the order of the quarters, to sixteen columns. */
INLINE __m512i add_partials(const __m512i sums[QUARTERS]) {
    __m512i low =
        _mm512_add_epi32(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
    __m512i high =
        _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2], sums[3]), _mm512_unpackhi_epi32(sums[2], sums[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

INLINE __m512 add_partials_ps(const __m512 sums[QUARTERS]) {
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    __m512d l = _mm512_castps_pd(low), h = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(l, h)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(l, h)));
}

/* add_partials gives column i of each quarter in 128-bit lane i. */
INLINE __m512i column_order(void) {
    return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

INLINE void add_to(float *acc, __m512 part, bool is_first) {
    _mm512_storeu_ps(acc, is_first ? part : _mm512_add_ps(_mm512_loadu_ps(acc), part));
}

#endif
