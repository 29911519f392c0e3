/* What a product of either x86 tier walks over: a column of packed tiles, a block of activations, a row of
 * sums. Include it after avx2_begin.h or avx512_begin.h. */
#ifndef GLM53_TILE_COLUMN_H
#define GLM53_TILE_COLUMN_H

#include "internal.h"

enum { K_TILES = GLM53_BLOCK / GLM53_TILE };

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
        uintptr_t ahead =
            (uintptr_t)(column.first + i * column.stride) + PREFETCH_BYTES; /* may be past the end */
        for (size_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch((const void *)(ahead + at), 0, 3);
    }
}

INLINE const float *block_of(const glm53_rect *rect, int32_t b, int32_t r) {
    return rect->x + ((size_t)b * (size_t)rect->rows + (size_t)r) * GLM53_X_FLOATS;
}

INLINE float *acc_of(const glm53_rect *rect, int32_t r, int32_t nt) {
    return rect->acc + (size_t)r * rect->acc_stride + (size_t)(nt - rect->tile_begin) * GLM53_TILE;
}

INLINE const glm53_fast_block *fast_block_of(const glm53_rect *rect, int32_t b, int32_t r) {
    return (const glm53_fast_block *)(const void *)block_of(rect, b, r);
}

#endif
