/* Products with one matrix: the cut into tasks, and the public functions that need one matrix only. */
#include "product.h"

static int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

/* About 16 tasks per matrix: enough to share one expert among many threads, few enough that adding up the
 * spans stays below one per cent of the work (4096 x 2048: 16 spans of 256 k). */
enum { BAND_TILES = 128, WANTED_TASKS = 16 };

glm53_cut glm53_cut_matrix(const glm53_matrix *matrix) {
    glm53_cut cut;
    cut.num_blocks = matrix->in_features / GLM53_BLOCK;
    cut.num_tiles = matrix->out_features / GLM53_TILE;
    cut.band_tiles = min_i32(cut.num_tiles, BAND_TILES);
    cut.num_bands = ceil_div(cut.num_tiles, cut.band_tiles);
    cut.span_blocks = ceil_div(cut.num_blocks, ceil_div(WANTED_TASKS, cut.num_bands));
    cut.num_spans = ceil_div(cut.num_blocks, cut.span_blocks);
    return cut;
}

int32_t glm53_effective_precision(const glm53_pool *pool, const glm53_matrix *matrix, int32_t precision) {
    if (!pool || !matrix || precision != GLM53_FAST16) return GLM53_EXACT32;
    return glm53_pool_tier(pool)->has_fast16(matrix) ? GLM53_FAST16 : GLM53_EXACT32;
}

glm53_product glm53_product_of(const glm53_pool *pool, const glm53_matrix *matrix, int32_t rows,
                               int32_t precision, bool is_wide) {
    glm53_product product = {
        .matrix = matrix, .rows = rows, .is_wide = is_wide, .cut = glm53_cut_matrix(matrix)};
    product.plan = glm53_pool_plan(pool, matrix->bits_x2);
    product.precision = glm53_effective_precision(pool, matrix, precision);
    product.block_end = product.cut.num_blocks;
    product.end_span = product.cut.num_spans;
    product.num_parts = is_wide ? 1 : product.cut.num_spans;
    return product;
}

void glm53_product_narrow(glm53_product *product, int32_t begin, int32_t end) {
    product->block_begin = begin;
    product->block_end = end;
    product->first_span = begin / product->cut.span_blocks;
    product->end_span = ceil_div(end, product->cut.span_blocks);
    product->num_parts = product->end_span - product->first_span;
}

int64_t glm53_product_tasks(const glm53_product *product) {
    const glm53_cut *cut = &product->cut;
    if (product->is_wide) return product->matrix->out_features / GLM53_BLOCK;
    return (int64_t)cut->num_spans * cut->num_bands;
}

size_t glm53_product_part_floats(const glm53_product *product) {
    return (size_t)product->num_parts * (size_t)product->rows * (size_t)product->matrix->out_features;
}

void glm53_product_multiply(const glm53_tier *tier, const glm53_product *product, const glm53_rect *rect) {
    if (product->precision == GLM53_FAST16) {
        tier->multiply_fast(rect);
    } else {
        tier->multiply_exact(rect);
    }
}

glm53_rect glm53_product_rect(const glm53_product *product, int32_t span, int32_t tile_begin,
                              int32_t tile_end) {
    const glm53_cut *cut = &product->cut;
    size_t out = (size_t)product->matrix->out_features;
    glm53_rect rect = {.matrix = product->matrix,
                       .plan = product->plan,
                       .x = product->x,
                       .rows = product->rows,
                       .acc_stride = out};
    rect.block_begin = max_i32(span * cut->span_blocks, product->block_begin);
    rect.block_end = min_i32((span + 1) * cut->span_blocks, product->block_end);
    rect.tile_begin = tile_begin;
    rect.tile_end = tile_end;
    size_t part = (size_t)(span - product->first_span);
    rect.acc = product->parts + part * (size_t)product->rows * out + (size_t)tile_begin * GLM53_TILE;
    return rect;
}

void glm53_rect_prefetch(const glm53_rect *rect) {
    size_t halves = glm53_tile_halves(rect->matrix), bytes = 2 * halves * GLM53_AHEAD_TILES;
    size_t stride = (size_t)(rect->matrix->out_features / GLM53_TILE) * halves;
    const uint16_t *first = rect->matrix->trellis +
                            (size_t)rect->block_begin * (GLM53_BLOCK / GLM53_TILE) * stride +
                            (size_t)rect->tile_begin * halves;
    for (size_t i = 0; i < GLM53_BLOCK / GLM53_TILE; i++) {
        uintptr_t run = (uintptr_t)(first + i * stride);
        for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const void *)(run + at), 0, 3);
    }
}

static void few_task(const glm53_tier *tier, const glm53_product *product, int64_t task) {
    const glm53_cut *cut = &product->cut;
    int32_t span = (int32_t)(task / cut->num_bands),
            begin = (int32_t)(task % cut->num_bands) * cut->band_tiles;
    glm53_rect rect =
        glm53_product_rect(product, span, begin, min_i32(begin + cut->band_tiles, cut->num_tiles));
    glm53_product_multiply(tier, product, &rect);
}

static void wide_task(const glm53_tier *tier, const glm53_product *product, int64_t task, float *temp) {
    const glm53_cut *cut = &product->cut;
    size_t out = (size_t)product->matrix->out_features;
    float *sums = product->parts + (size_t)task * GLM53_BLOCK;
    glm53_rect rect = {
        .matrix = product->matrix, .plan = product->plan, .x = product->x, .rows = product->rows};
    rect.tile_begin = (int32_t)task * (GLM53_BLOCK / GLM53_TILE);
    rect.tile_end = rect.tile_begin + GLM53_BLOCK / GLM53_TILE;
    for (int32_t span = 0; span < cut->num_spans; span++) {
        rect.acc = span == 0 ? sums : temp;
        rect.acc_stride = span == 0 ? out : GLM53_BLOCK;
        rect.block_begin = span * cut->span_blocks;
        rect.block_end = min_i32(rect.block_begin + cut->span_blocks, cut->num_blocks);
        glm53_rect next = rect;
        next.block_begin = rect.block_end;
        rect.next = span + 1 < cut->num_spans ? &next : NULL;
        glm53_product_multiply(tier, product, &rect);
        for (int32_t r = 0; span > 0 && r < product->rows; r++) {
            float *sum = sums + (size_t)r * out;
            const float *part = temp + (size_t)r * GLM53_BLOCK;
            for (int32_t i = 0; i < GLM53_BLOCK; i++) sum[i] += part[i];
        }
    }
}

void glm53_product_task(const glm53_tier *tier, const glm53_product *product, int64_t task, float *temp) {
    if (product->is_wide) {
        wide_task(tier, product, task, temp);
    } else {
        few_task(tier, product, task);
    }
}

void glm53_product_prepare(const glm53_tier *tier, const glm53_product *product, int32_t r, const float *x,
                           int32_t begin, int32_t end) {
    const uint16_t *suh = product->matrix->suh;
    for (int32_t b = begin; b < end; b++) {
        float *block = product->x + ((size_t)b * (size_t)product->rows + (size_t)r) * GLM53_X_FLOATS;
        tier->prepare(x + (size_t)b * GLM53_BLOCK, suh + (size_t)b * GLM53_BLOCK, product->precision, block);
    }
}

void glm53_product_finish(const glm53_tier *tier, const glm53_product *product, int32_t r, int32_t block,
                          float *y) {
    const glm53_matrix *matrix = product->matrix;
    size_t out = (size_t)matrix->out_features;
    size_t column = (size_t)block * GLM53_BLOCK;
    const uint16_t *bias = matrix->bias && product->block_begin == 0 ? matrix->bias + column : NULL;
    tier->finish(product->parts + (size_t)r * out + column, product->num_parts, (size_t)product->rows * out,
                 matrix->svh + column, bias, y);
}

/* ---- linear ---- */

typedef struct {
    glm53_product product;
    const float *x;
    float *y;
    float *temps; /* (threads, rows, 128) */
} linear_job;

static void linear_main(glm53_pool *pool, void *context, int32_t thread) {
    const linear_job *job = context;
    const glm53_product *product = &job->product;
    const glm53_tier *tier = glm53_pool_tier(pool);
    size_t in = (size_t)product->matrix->in_features, out = (size_t)product->matrix->out_features;
    int64_t rows = product->rows, out_blocks = product->matrix->out_features / GLM53_BLOCK, task;
    while ((task = glm53_pool_next(pool)) < rows) {
        glm53_product_prepare(tier, product, (int32_t)task, job->x + (size_t)task * in, 0,
                              product->cut.num_blocks);
    }
    glm53_pool_barrier(pool);
    float *temp = job->temps + (size_t)thread * (size_t)rows * GLM53_BLOCK;
    while ((task = glm53_pool_next(pool)) < glm53_product_tasks(product)) {
        glm53_product_task(tier, product, task, temp);
    }
    glm53_pool_barrier(pool);
    while ((task = glm53_pool_next(pool)) < rows * out_blocks) {
        size_t r = (size_t)(task / out_blocks), block = (size_t)(task % out_blocks);
        glm53_product_finish(tier, product, (int32_t)r, (int32_t)block,
                             job->y + r * out + block * GLM53_BLOCK);
    }
}

int32_t glm53_linear(glm53_pool *pool, const glm53_matrix *matrix, const float *x, int32_t rows,
                     int32_t precision, float *y) {
    if (!pool || !x || !y || rows < 1) return GLM53_BAD_ARGUMENT;
    if (precision != GLM53_EXACT32 && precision != GLM53_FAST16) return GLM53_BAD_ARGUMENT;
    int32_t status = glm53_matrix_check(matrix);
    if (status != GLM53_OK) return status;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    bool is_wide = rows > GLM53_FEW_ROWS;
    linear_job job = {.x = x, .y = y, .product = glm53_product_of(pool, matrix, rows, precision, is_wide)};
    size_t x_floats = (size_t)rows * (size_t)matrix->in_features;
    /* The wide path sums straight into y and transforms in place. */
    size_t part_floats = is_wide ? 0 : glm53_product_part_floats(&job.product);
    size_t temp_floats = is_wide ? (size_t)glm53_pool_threads(pool) * (size_t)rows * GLM53_BLOCK : 0;
    float *scratch = glm53_pool_scratch(pool, (x_floats + part_floats + temp_floats) * sizeof(float));
    if (scratch) {
        job.product.x = scratch;
        job.product.parts = is_wide ? y : scratch + x_floats;
        job.temps = scratch + x_floats + part_floats;
        glm53_pool_run(pool, linear_main, &job, (int64_t)rows * matrix->in_features * matrix->out_features);
    }
    glm53_pool_release(pool);
    return scratch ? GLM53_OK : GLM53_NO_MEMORY;
}

/* ---- decode and Hadamard ---- */

typedef struct {
    const glm53_matrix *matrix;
    float *w;
} decode_job;

static void decode_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const decode_job *job = context;
    const glm53_tier *tier = glm53_pool_tier(pool);
    size_t out = (size_t)job->matrix->out_features;
    for (int64_t b; (b = glm53_pool_next(pool)) < job->matrix->in_features / GLM53_BLOCK;) {
        tier->decode_block(job->matrix, (int32_t)b, job->w + (size_t)b * GLM53_BLOCK * out);
    }
}

int32_t glm53_decode(glm53_pool *pool, const glm53_matrix *matrix, float *w) {
    if (!pool || !w) return GLM53_BAD_ARGUMENT;
    int32_t status = glm53_matrix_check(matrix);
    if (status != GLM53_OK) return status;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    decode_job job = {.matrix = matrix, .w = w};
    glm53_pool_run(pool, decode_main, &job, (int64_t)matrix->in_features * matrix->out_features);
    glm53_pool_release(pool);
    return GLM53_OK;
}

typedef struct {
    const float *x;
    float *y;
    int64_t rows;
    size_t width;
} hadamard_job;

static void hadamard_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const hadamard_job *job = context;
    const glm53_tier *tier = glm53_pool_tier(pool);
    for (int64_t r; (r = glm53_pool_next(pool)) < job->rows;) {
        for (size_t i = 0; i < job->width; i += GLM53_BLOCK) {
            tier->hadamard(job->x + (size_t)r * job->width + i, job->y + (size_t)r * job->width + i);
        }
    }
}

int32_t glm53_hadamard(glm53_pool *pool, const float *x, int32_t rows, int32_t width, float *y) {
    if (!pool || !x || !y || rows < 1) return GLM53_BAD_ARGUMENT;
    if (width < GLM53_BLOCK || width % GLM53_BLOCK) return GLM53_BAD_SHAPE;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    hadamard_job job = {.x = x, .y = y, .rows = rows, .width = (size_t)width};
    glm53_pool_run(pool, hadamard_main, &job, (int64_t)rows * width * 7);
    glm53_pool_release(pool);
    return GLM53_OK;
}
