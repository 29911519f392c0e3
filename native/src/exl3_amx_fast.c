/* AMX: products of unsummed bytes with 16-bit activations in halves (codebook mul1, K = 3, up to four rows).
 * Integer sums over a block are exact, so the results equal the ones of AVX2 and AVX-512 bit for bit.
 *
 * A mul1 weight is affine in the sum of the four bytes of state * 0x83dcd12d. AVX-512 adds the four up and
 * multiplies by an activation; TDPBUSD multiplies each of them by it and adds all up. An activation is a pair
 * of signed bytes, q = 256 high + low, and the bytes of the weights lie in the registers as they come out of
 * the multiplications. A step decodes the 16 rows of two columns m, m + 1, and of the two that lie 8 further
 * on: a window per lane of the packed layout (avx2_weights.h), all four of a column side by side.
 *
 *     32-bit lane k    0 .. 7      8 .. 15
 *     column           m           m + 1             (+8 in the second register)
 *     low word         rows 0..7   rows 0..7         two of the four bytes of each weight in the register
 *     high word        rows 8..15  rows 8..15        `low`, the other two in the register `high`
 *
 * So the eight registers of a tile, each as `low` and as `high`, want one and the same right operand, and are
 * together the 16 rows of one left operand:
 *
 *     left (16, 64)    row t + 4 i + 8 h: columns 2 t, 2 t + 1 (+8 if i) of the tile, `high` if h
 *     right (16, 4n)   row k: for row a of the activations and c = 0, 1: the low and the high halves for lane
 *                      k's rows where k's column is m + c, else zeros; n = 4 a + 2 is_high + c
 *     sums (16, n)     of one tile's columns over the 128 rows of a block
 *
 * Four tiles side by side share a right operand, and each has sums of its own: one TDPBUSD waits 52 cycles
 * for the one before it on the same sums, and the decoding of four tiles takes longer.
 *
 * Count for 64 weights: vpermb, two vpmultishiftqb and twice vpmullw, vpmulhuw, vpmullw, vpaddw: 11 vector
 * operations instead of 19, which take 5.5 cycles on Intel's two 512-bit ports. Beside them, on other ports,
 * four stores, and per 256 weights one TDPBUSD (16 cycles of the tile unit) and 1.25 tile loads (10 cycles of
 * the two load ports): both units are idle more than half of the time, so spending the tile unit's work on
 * zeros and on unsummed bytes costs nothing. A block of 32 tiles spends some 50 cycles on its right operands.
 * Reckoned from Intel's tables, not measured.
 *
 * A tile load cannot take what a store has not yet brought to the cache, so a tile is loaded when its slot in
 * the buffer is about to be filled anew, four tiles (some 90 cycles) after it was decoded, and multiplied two
 * tiles later. If it were multiplied at once, the load (45 cycles) and TDPBUSD (52) would have to end within
 * those 90 cycles, or the next stores, which retire behind them, would be late. The sums of four columns
 * leave the tile unit in the second k-tile of the next four, and are read two k-tiles later. */
#include "exl3_amx.h"
#include "exl3_avx512.h"

#ifdef GLM53_HAS_AMX
#include "amx_tiles.h"
#include "avx512_begin.h"
#include "avx512_weights.h"

enum { K3_HALVES = 48, LANES = 16, GROUP_TILES = 4, HALF_REGISTERS = 4, MOST_ROWS = 4 };

/* AVX-512's plan, for what its kernels do, and the windows of two columns. */
typedef struct {
    tile_plan common;
    __m512i index[HALF_REGISTERS];
} amx_plan;

_Static_assert(sizeof(amx_plan) <= GLM53_PLAN_BYTES, "a pool has no more room for a plan");

/* As window_index, for the four lanes of columns 2 t and 2 t + 1 in the source that load_tile gives. */
static __m512i column_index(int32_t t) {
    uint8_t index[64];
    int32_t origin = t < 2 ? 4 : -32;
    for (int32_t i = 0; i < 64; i++) {
        int32_t column = 2 * t + (i >> 5), p = i >> 3 & 3;
        index[i] = (uint8_t)((origin + 12 * column + window_byte(6, p, 0) + 7 - (i & 7)) ^ 3);
    }
    return _mm512_loadu_si512(index);
}

void glm53_amx_plan(int32_t bits_x2, void *plan) {
    amx_plan *amx = plan;
    plan_tiles(&amx->common, bits_x2);
    for (int32_t t = 0; t < HALF_REGISTERS; t++) amx->index[t] = column_index(t);
}

/* ---- left operands ---- */

typedef struct {
    _Alignas(64) uint8_t row[TILE_ROWS][TILE_BYTES];
} left_operand;

/* What decoding wants in registers: the plan lies in memory, which the stores between might change. */
typedef struct {
    __m512i index[HALF_REGISTERS], shift[2], low_factor, high_factor;
} decode_constants;

INLINE decode_constants constants_of(const amx_plan *plan) {
    decode_constants constants = {.low_factor = _mm512_set1_epi16((short)0xd12d),
                                  .high_factor = _mm512_set1_epi16((short)0x83dc)};
    for (int32_t t = 0; t < HALF_REGISTERS; t++) constants.index[t] = plan->index[t];
    for (int32_t i = 0; i < 2; i++) constants.shift[i] = plan->common.shift[2 * i];
    return constants;
}

INLINE void decode_tile(const uint16_t *tile, const decode_constants *constants, left_operand *left) {
    tile_source source;
    load_tile(&source, tile, NULL, FORMAT_K3);
#pragma GCC unroll 4
    for (int32_t t = 0; t < HALF_REGISTERS; t++) {
        __m512i windows = _mm512_permutexvar_epi8(constants->index[t], source.groups[t / 2]);
#pragma GCC unroll 2
        for (int32_t i = 0; i < 2; i++) {
            __m512i s = _mm512_multishift_epi64_epi8(constants->shift[i], windows);
            __m512i low = _mm512_mullo_epi16(s, constants->low_factor);
            __m512i high = _mm512_add_epi16(_mm512_mulhi_epu16(s, constants->low_factor),
                                            _mm512_mullo_epi16(s, constants->high_factor));
            _mm512_store_si512(left->row[t + 4 * i], low);
            _mm512_store_si512(left->row[t + 4 * i + 8], high);
        }
    }
}

/* ---- right operands ---- */

/* Activations of a block, spread for one k-tile after the other: (K_TILES, LANES, width, 4, 4) bytes, where
 * width, 1, 2 or 4, is the number of rows rounded up. */
typedef struct {
    _Alignas(64) uint8_t bytes[K_TILES * LANES * MOST_ROWS * 16];
} right_operands;

/* Of rows h = 0: 0..3 and 8..11, or h = 1: 4..7 and 12..15 of k-tile kt, in the order that prepare gave them:
 * 16-bit halves in pairs of low and high signed byte. */
INLINE __m128i halves(const glm53_rect *rect, int32_t b, int32_t r, int32_t kt, int32_t h) {
    if (r >= rect->rows) return _mm_setzero_si128();
    const void *at = fast_block_of(rect, b, r)->q + 16 * kt + 8 * h;
    __m128i q = _mm_loadu_si128((const __m128i *)at);
    /* q + 128 has the high byte rounded, and the low one with the top bit inverted. */
    return _mm_xor_si128(_mm_add_epi16(q, _mm_set1_epi16(128)), _mm_set1_epi16(0x80));
}

/* To width x 4 32-bit lanes: the activations of one lane k together. */
INLINE void interleave(const __m128i x[MOST_ROWS], int32_t width, __m128i y[MOST_ROWS]) {
    if (width == 1) {
        y[0] = x[0];
        return;
    }
    __m128i low = _mm_unpacklo_epi32(x[0], x[1]), high = _mm_unpackhi_epi32(x[0], x[1]);
    if (width == 2) {
        y[0] = low;
        y[1] = high;
        return;
    }
    __m128i low2 = _mm_unpacklo_epi32(x[2], x[3]), high2 = _mm_unpackhi_epi32(x[2], x[3]);
    y[0] = _mm_unpacklo_epi64(low, low2);
    y[1] = _mm_unpackhi_epi64(low, low2);
    y[2] = _mm_unpacklo_epi64(high, high2);
    y[3] = _mm_unpackhi_epi64(high, high2);
}

/* Lane k of columns m and m + 1 has the same activations: the second half of an operand is the first one with
 * the other columns zero. A 32-bit lane of activations spreads over 16 bytes (n = 0..3, j = 0..3): half n / 2
 * of row j / 2. */
INLINE void spread(const glm53_rect *rect, int32_t b, int32_t width, right_operands *right) {
    const __m512i order =
        _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 2, 2, 0, 0, 2, 2, 1, 1, 3, 3, 1, 1, 3, 3)),
                        _mm512_set_epi64(0x0c0c0c0c0c0c0c0c, 0x0c0c0c0c0c0c0c0c, 0x0808080808080808,
                                         0x0808080808080808, 0x0404040404040404, 0x0404040404040404, 0, 0));
    const __mmask64 first = 0x0f0f0f0f0f0f0f0fu, second = 0xf0f0f0f0f0f0f0f0u;
    for (int32_t kt = 0; kt < K_TILES; kt++) {
        uint8_t *to = right->bytes + (size_t)kt * LANES * (size_t)width * 16;
        for (int32_t h = 0; h < 2; h++) {
            __m128i x[MOST_ROWS], y[MOST_ROWS];
            for (int32_t a = 0; a < width; a++) x[a] = halves(rect, b, a, kt, h);
            interleave(x, width, y);
            for (int32_t i = 0; i < width; i++) {
                __m512i four = _mm512_broadcast_i32x4(y[i]);
                size_t at = 64 * ((size_t)h * (size_t)width + (size_t)i);
                _mm512_store_si512(to + at, _mm512_maskz_shuffle_epi8(first, four, order));
                _mm512_store_si512(to + at + 128 * (size_t)width,
                                   _mm512_maskz_shuffle_epi8(second, four, order));
            }
        }
    }
}

/* ---- sums ---- */

/* Of four tiles: (16, width, 4) each. */
typedef struct {
    _Alignas(64) int32_t n[GROUP_TILES][TILE_ROWS * MOST_ROWS * 4];
} group_sums;

/* The sums of activation row a in rows 4 m .. 4 m + 3 of a tile: low halves of two columns and high ones. */
INLINE __m512i four_rows(const int32_t *sums, int32_t width, int32_t a, int32_t m) {
    const int32_t *at = sums + 16 * m * width + 4 * a;
    if (width == 1) return _mm512_load_si512(at);
    __m512i rows = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)(const void *)at));
    rows = _mm512_inserti32x4(rows, _mm_load_si128((const __m128i *)(const void *)(at + 4 * width)), 1);
    rows = _mm512_inserti32x4(rows, _mm_load_si128((const __m128i *)(const void *)(at + 8 * width)), 2);
    return _mm512_inserti32x4(rows, _mm_load_si128((const __m128i *)(const void *)(at + 12 * width)), 3);
}

/* As flush_fast. Sums mod 2^32 are the integer sum of the block, which fits. */
INLINE void flush_tile(const int32_t *sums, int32_t width, int32_t a, const glm53_fast_block *block,
                       float *acc, bool is_first) {
    const __m512i low_order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
    const __m512i high_order = _mm512_add_epi32(low_order, _mm512_set1_epi32(2));
    __m512i left = _mm512_add_epi32(four_rows(sums, width, a, 0), four_rows(sums, width, a, 2));
    __m512i right = _mm512_add_epi32(four_rows(sums, width, a, 1), four_rows(sums, width, a, 3));
    __m512i low = _mm512_permutex2var_epi32(left, low_order, right);
    __m512i high = _mm512_permutex2var_epi32(left, high_order, right);
    __m512i columns = _mm512_add_epi32(low, _mm512_slli_epi32(high, 8));
    __m512 part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(columns), _mm512_set1_ps(block->slope),
                                  _mm512_set1_ps(block->offset));
    add_to(acc, part, is_first);
}

/* ---- the product ---- */

/* Four tiles side by side, in one block. */
typedef struct {
    const right_operands *right;
    int32_t b, nt;
    bool is_there; /* false of what is before the first one */
} tile_group;

typedef struct {
    const glm53_rect *rect;
    tile_state tiles;
    left_operand left[GROUP_TILES]; /* 4 KiB: no two slots are alike in the low bits of their addresses */
    group_sums sums;
    right_operands right[2]; /* of this block and of the one before, whose last tiles wait */
} amx_product;

/* Clears the tiles, too. */
INLINE void configure(amx_product *p, int32_t width) {
    tile_config config = {.palette = 1};
    for (int32_t i = 0; i < TILE_COUNT; i++) {
        config.rows[i] = TILE_ROWS;
        config.row_bytes[i] = (uint16_t)(i <= GROUP_TILES ? 16 * width : TILE_BYTES);
    }
    tile_configure(&p->tiles, &config);
}

/* Tile registers 0 to 3: the sums of each tile of a group; 4: right operand; 5 and 6: left ones in turn. */
#define POSITION(p, slot, reg, sums)     \
    tile_dot(&(p)->tiles, sums, reg, 4); \
    tile_load(&(p)->tiles, reg, (p)->left[slot].row, TILE_BYTES, &(p)->left[slot])

/* Multiply what was loaded two positions ago, then load slot i, before a new tile takes its place. A switch,
 * since the tile unit's registers are named by literals; i is a constant where the compiler unrolls. */
INLINE void position(amx_product *p, int32_t i) {
    switch (i) {
        case 0:
            POSITION(p, 0, 5, 2);
            break;
        case 1:
            POSITION(p, 1, 6, 3);
            break;
        case 2:
            POSITION(p, 2, 5, 0);
            break;
        default:
            POSITION(p, 3, 6, 1);
            break;
    }
}

INLINE void load_right(amx_product *p, const right_operands *right, int32_t kt, int32_t width) {
    const uint8_t *at = right->bytes + (size_t)(kt * LANES * 16 * width);
    tile_load(&p->tiles, 4, at, 16 * width, right);
}

/* And begin new ones. */
#define TAKE_SUMS(p, i, width)                                                 \
    tile_store(&(p)->tiles, i, (p)->sums.n[i], 16 * (width), &(p)->sums.n[i]); \
    tile_zero(&(p)->tiles, i)

INLINE void take_sums(amx_product *p, int32_t width) {
    TAKE_SUMS(p, 0, width);
    TAKE_SUMS(p, 1, width);
    TAKE_SUMS(p, 2, width);
    TAKE_SUMS(p, 3, width);
}

INLINE void flush_group(const amx_product *p, const tile_group *group, int32_t width) {
    const glm53_rect *rect = p->rect;
    for (int32_t a = 0; a < rect->rows; a++) {
        const glm53_fast_block *block = fast_block_of(rect, group->b, a);
        float *acc = acc_of(rect, a, group->nt);
        for (int32_t i = 0; i < GROUP_TILES; i++) {
            flush_tile(p->sums.n[i], width, a, block, acc + i * GLM53_TILE, group->b == rect->block_begin);
        }
    }
}

/* Decode the tiles of a group, and multiply what was decoded six tiles before each: the last ones of the
 * group before at first. */
INLINE void multiply_group(amx_product *p, const decode_constants *constants, const tile_group *before,
                           const tile_group *group, int32_t width) {
    tile_column column = column_at(p->rect, group->b, group->nt);
    tile_column ahead = column_ahead(p->rect, group->b, group->nt);
    for (int32_t kt = 0; kt < K_TILES; kt++) {
        if (ahead.first) prefetch_run(ahead.first, GROUP_TILES * K3_HALVES);
#pragma GCC unroll 4
        for (int32_t i = 0; i < GROUP_TILES; i++) {
            if (i == 2 && kt == 1) take_sums(p, width);
            if (i == 2)
                load_right(p, kt == 0 ? before->right : group->right, (kt - 1) & (K_TILES - 1), width);
            position(p, i);
            decode_tile(column.first + i * K3_HALVES, constants, p->left + i);
        }
        if (kt == 3 && before->is_there) flush_group(p, before, width);
        column.first += column.stride;
        if (ahead.first) ahead.first += ahead.stride;
    }
}

INLINE void multiply_last(amx_product *p, const tile_group *group, int32_t width) {
    position(p, 0);
    position(p, 1);
    load_right(p, group->right, K_TILES - 1, width);
    position(p, 2);
    position(p, 3);
    position(p, 0); /* what these two load is not used */
    position(p, 1);
    take_sums(p, width);
    flush_group(p, group, width);
}

/* width is a compile-time constant. Configuring the unit takes some 200 cycles, and the last tiles as long
 * again, in some 11,000 for a task of two blocks and 32 tiles. Once per job would spare the former, but leave
 * the unit in use while a thread waits for others. */
INLINE void multiply_k3(const glm53_rect *rect, int32_t width) {
    amx_product p;
    p.rect = rect;
    configure(&p, width);
    const decode_constants constants = constants_of(rect->plan);
    /* Before the first group comes whatever is in the slots, into sums that are not flushed. */
    tile_group before = {.right = &p.right[rect->block_begin & 1]};
    for (int32_t b = rect->block_begin; b < rect->block_end; b++) {
        right_operands *right = &p.right[b & 1];
        spread(rect, b, width, right);
        for (int32_t nt = rect->tile_begin; nt < rect->tile_end; nt += GROUP_TILES) {
            tile_group group = {.right = right, .b = b, .nt = nt, .is_there = true};
            multiply_group(&p, &constants, &before, &group, width);
            before = group;
        }
    }
    multiply_last(&p, &before, width);
    tile_release(&p.tiles);
}

void glm53_amx_multiply_fast(const glm53_rect *rect) {
    if (rect->matrix->bits_x2 != 6 || rect->rows > MOST_ROWS) {
        glm53_avx512_multiply_fast(rect);
    } else if (rect->rows == 1) {
        multiply_k3(rect, 1);
    } else if (rect->rows == 2) {
        multiply_k3(rect, 2);
    } else {
        multiply_k3(rect, 4);
    }
}

#include "target_end.h"
#else
/* An empty translation unit is not C. */
typedef int glm53_no_amx_fast;
#endif
