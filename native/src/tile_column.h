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

/* Runs of tiles are read by eight streams at once, one per k-tile, and end after a band of columns: the
 * hardware follows them only in part. So each column of tiles fetches one that comes a little later on the
 * thread's way: in the run, at the beginning of the next block's, or of the next rectangle's. first is NULL
 * if nothing comes. */
INLINE tile_column column_ahead(const glm53_rect *rect, int32_t b, int32_t nt) {
    int32_t ahead = nt + GLM53_AHEAD_TILES, past = ahead - rect->tile_end;
    if (past < 0) return column_at(rect, b, ahead);
    if (b + 1 < rect->block_end) return column_at(rect, b + 1, rect->tile_begin + past);
    if (rect->next) return column_at(rect->next, rect->next->block_begin, rect->next->tile_begin + past);
    return (tile_column){0};
}

INLINE void prefetch_run(const uint16_t *run, size_t num_halves) {
    for (size_t at = 0; at < 2 * num_halves; at += 64) __builtin_prefetch((const char *)run + at, 0, 3);
}

INLINE void prefetch_ahead(const glm53_rect *rect, int32_t b, int32_t nt) {
    tile_column column = column_ahead(rect, b, nt);
    if (!column.first) return;
    size_t halves = glm53_tile_halves(rect->matrix);
    for (size_t i = 0; i < K_TILES; i++) prefetch_run(column.first + i * column.stride, halves);
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
