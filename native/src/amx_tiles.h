/* The tile unit of AMX, as far as a product needs it: eight registers of up to 16 rows of up to 64 bytes.
 * Tile numbers are literals. Every function and macro takes the state, which is empty where the unit is real.
 *
 * Statements of our own instead of amxtileintrin.h: gcc's (12, 14) do not say what memory a tile load or a
 * configuration reads, so that the compiler may move or drop the stores before it.
 *
 * GLM53_AMX_EMULATED puts portable C in place of the unit, for tests on machines without it. It follows the
 * operations of palette 1 in the Intel 64 and IA-32 Architectures Software Developer's Manual (volume 2:
 * LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE, TDPBUSD), and traps where they fault. */
#ifndef GLM53_AMX_TILES_H
#define GLM53_AMX_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE_COUNT = 8, TILE_ROWS = 16, TILE_BYTES = 64 };

/* The memory operand of LDTILECFG. */
typedef struct {
    uint8_t palette; /* 1 */
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16]; /* the first TILE_COUNT; the others are 0 */
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "LDTILECFG reads 64 bytes");

#ifndef GLM53_AMX_EMULATED

typedef struct {
    char none;
} tile_state;

static inline void tile_configure(tile_state *state, const tile_config *config) {
    (void)state;
    __asm__ volatile("ldtilecfg %0" ::"m"(*config));
}

/* Gives the unit back: what is left in its registers would be saved at each change of threads, and keeps an
 * idle core from its deeper sleep. */
static inline void tile_release(tile_state *state) {
    (void)state;
    __asm__ volatile("tilerelease");
}

/* Rows of `stride` bytes from `base` on, within *object, which is all that the compiler has to know. */
#define tile_load(state, tile, base, stride, object)                        \
    do {                                                                    \
        (void)(state);                                                      \
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                 \
                         :                                                  \
                         : "r"(base), "r"((long)(stride)), "m"(*(object))); \
    } while (0)

#define tile_store(state, tile, base, stride, object)           \
    do {                                                        \
        (void)(state);                                          \
        __asm__ volatile("tilestored %%tmm" #tile ", (%1,%2,1)" \
                         : "+m"(*(object))                      \
                         : "r"(base), "r"((long)(stride)));     \
    } while (0)

#define tile_zero(state, tile)                   \
    do {                                         \
        (void)(state);                           \
        __asm__ volatile("tilezero %tmm" #tile); \
    } while (0)

/* sums[m][n] += sum over k < 16, j < 4 of left[m][4 k + j] (unsigned) * right[k][4 n + j] (signed), in 32
 * bits. */
#define tile_dot(state, sums, left, right)                                     \
    do {                                                                       \
        (void)(state);                                                         \
        __asm__ volatile("tdpbusd %tmm" #right ", %tmm" #left ", %tmm" #sums); \
    } while (0)

#else

typedef struct {
    tile_config config; /* all zeros: not configured */
    uint8_t data[TILE_COUNT][TILE_ROWS][TILE_BYTES];
} tile_state;

static inline void tile_check(bool is_valid) {
    if (!is_valid) __builtin_trap();
}

static inline void tile_configure(tile_state *state, const tile_config *config) {
    tile_check(config->palette == 1 && config->start_row == 0);
    for (int32_t i = 0; i < 14; i++) tile_check(config->reserved[i] == 0);
    for (int32_t i = 0; i < 16; i++) {
        int32_t rows = config->rows[i], row_bytes = config->row_bytes[i];
        tile_check(i < TILE_COUNT ? rows <= TILE_ROWS && row_bytes <= TILE_BYTES : !rows && !row_bytes);
        tile_check((rows == 0) == (row_bytes == 0));
    }
    memset(state, 0, sizeof *state);
    state->config = *config;
}

static inline void tile_release(tile_state *state) { memset(state, 0, sizeof *state); }

/* A tile's rows lie within an object of `bytes` bytes. */
static inline void tile_check_memory(const tile_state *state, int32_t tile, const void *base, size_t stride,
                                     const void *object, size_t bytes) {
    tile_check(state->config.rows[tile] > 0);
    uintptr_t first = (uintptr_t)base, limit = (uintptr_t)object + bytes;
    uintptr_t last = first + (state->config.rows[tile] - 1u) * stride;
    tile_check(first >= (uintptr_t)object && last + state->config.row_bytes[tile] <= limit);
}

#define tile_load(state, tile, base, stride, object) \
    tile_load_emulated(state, tile, base, stride, object, sizeof *(object))

static inline void tile_load_emulated(tile_state *state, int32_t tile, const void *base, int32_t stride,
                                      const void *object, size_t bytes) {
    tile_check_memory(state, tile, base, (size_t)stride, object, bytes);
    memset(state->data[tile], 0, sizeof state->data[tile]);
    for (int32_t i = 0; i < state->config.rows[tile]; i++) {
        memcpy(state->data[tile][i], (const char *)base + i * stride, state->config.row_bytes[tile]);
    }
}

#define tile_store(state, tile, base, stride, object) \
    tile_store_emulated(state, tile, base, stride, object, sizeof *(object))

static inline void tile_store_emulated(const tile_state *state, int32_t tile, void *base, int32_t stride,
                                       const void *object, size_t bytes) {
    tile_check_memory(state, tile, base, (size_t)stride, object, bytes);
    for (int32_t i = 0; i < state->config.rows[tile]; i++) {
        memcpy((char *)base + i * stride, state->data[tile][i], state->config.row_bytes[tile]);
    }
}

static inline void tile_zero(tile_state *state, int32_t tile) {
    tile_check(state->config.rows[tile] > 0);
    memset(state->data[tile], 0, sizeof state->data[tile]);
}

static inline uint32_t tile_dot4(const uint8_t *left, const uint8_t *right) {
    int32_t sum = 0;
    for (int32_t j = 0; j < 4; j++) sum += left[j] * (int8_t)right[j];
    return (uint32_t)sum;
}

static inline void tile_dot(tile_state *state, int32_t sums, int32_t left, int32_t right) {
    const tile_config *config = &state->config;
    int32_t rows = config->rows[sums], columns = config->row_bytes[sums] / 4;
    int32_t depth = config->row_bytes[left] / 4;
    tile_check(sums != left && sums != right && left != right && rows > 0 && columns > 0 && depth > 0);
    tile_check(config->row_bytes[sums] % 4 == 0 && config->row_bytes[left] % 4 == 0);
    tile_check(config->rows[left] == rows && config->rows[right] == depth);
    tile_check(config->row_bytes[right] == config->row_bytes[sums]);
    for (int32_t m = 0; m < rows; m++) {
        uint32_t row[TILE_BYTES / 4];
        memcpy(row, state->data[sums][m], sizeof row);
        for (int32_t k = 0; k < depth; k++) {
            const uint8_t *four = state->data[left][m] + 4 * k;
            for (int32_t n = 0; n < columns; n++) row[n] += tile_dot4(four, state->data[right][k] + 4 * n);
        }
        memcpy(state->data[sums][m], row, sizeof row);
    }
}

#endif

#endif
