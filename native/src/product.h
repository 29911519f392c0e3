/* How a product is cut into tasks; shared by one linear and the expert FFN. Not installed. */
#ifndef GLM53_PRODUCT_H
#define GLM53_PRODUCT_H

#include "internal.h"

/* The cut of a matrix. It follows from the shape alone, since it fixes the order of the sums: blocks of k are
 * summed within a span, the spans' sums are added in order.
 *
 *            n: bands of at most 128 tiles (2048 columns), whose sums stay in the L1 and L2 caches
 *            +--------+--------+----
 *   k span  | task 0 | task 1 |        a task reads one run of packed tiles if there is one band,
 *            +--------+--------+----    runs of 128 tiles otherwise
 *   k span  | task 2 | ...
 */
typedef struct {
    int32_t num_blocks, span_blocks, num_spans;
    int32_t num_tiles, band_tiles, num_bands;
} glm53_cut;

glm53_cut glm53_cut_matrix(const glm53_matrix *matrix);

/* Up to this many rows a product keeps one partial sum per span (few); beyond, tasks are 128 columns of all
 * k (wide). Both sum in the same order, so the choice changes no bit. */
enum { GLM53_FEW_ROWS = 8 };

/* One product of a job: prepared blocks in, sums before the output transform out. */
typedef struct {
    const glm53_matrix *matrix;
    const void *plan;
    int32_t precision;
    int32_t rows;
    bool is_wide;
    glm53_cut cut;
    int32_t block_begin, block_end; /* of k: all, or what glm53_product_narrow left */
    int32_t first_span, end_span;   /* that these blocks touch */
    float *x;                       /* prepared, see glm53_rect */
    float *parts;                   /* few: (spans touched, rows, out); wide: (rows, out) */
    int32_t num_parts;              /* 1 or the spans touched */
} glm53_product;

/* Set everything but x and parts. */
glm53_product glm53_product_of(const glm53_pool *pool, const glm53_matrix *matrix, int32_t rows,
                               int32_t precision, bool is_wide);
/* Let few rows multiply with the blocks [begin, end) of k only. The spans stay where they are: with all
 * blocks no bit changes. */
void glm53_product_narrow(glm53_product *product, int32_t begin, int32_t end);
/* Of a product that was not narrowed. */
int64_t glm53_product_tasks(const glm53_product *product);
size_t glm53_product_part_floats(const glm53_product *product);
/* Do one task. temp: (rows, 128) floats of the calling thread, used if wide. */
void glm53_product_task(const glm53_tier *tier, const glm53_product *product, int64_t task, float *temp);
/* Columns [16 * tile_begin, 16 * tile_end) of one span; few only. Multiples of 8 tiles. */
glm53_rect glm53_product_rect(const glm53_product *product, int32_t span, int32_t tile_begin,
                              int32_t tile_end);
void glm53_product_multiply(const glm53_tier *tier, const glm53_product *product, const glm53_rect *rect);
/* Fetch the tiles that a rectangle begins with into the cache. */
void glm53_rect_prefetch(const glm53_rect *rect);
/* Prepare blocks [begin, end) of row r, given as x (in), for the product. */
void glm53_product_prepare(const glm53_tier *tier, const glm53_product *product, int32_t r, const float *x,
                           int32_t begin, int32_t end);
/* y[128]: columns [128 * block, + 128) of row r, after the output transform. */
void glm53_product_finish(const glm53_tier *tier, const glm53_product *product, int32_t r, int32_t block,
                          float *y);

#endif
