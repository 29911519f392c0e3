/* Hyper-connections: what mixes four residual streams into a block's input and its output back into them. */
#include <math.h>

#include "dense.h"

enum {
    S = GLM53_STREAMS,
    NUM_OUT = 2 * S + S * S,   /* pre, post, comb */
    NUM_SUMS = NUM_OUT + 1,    /* and the sum of squares */
    ROW_GROUP = 16,            /* rows that share one pass over a span of fn */
    MIX_WIDTH = GLM53_DOT_SPAN /* channels of one mixing task */
};

typedef struct {
    const glm53_mhc_job *spec;
    float *sums; /* (spans, rows, NUM_SUMS) */
    float *pre;  /* (rows, S) */
    int32_t width, num_spans;
} site_job;

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

static int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static void sum_phase(glm53_pool *pool, const site_job *job) {
    const glm53_mhc_job *spec = job->spec;
    const glm53_dense_kernels *kernels = glm53_pool_tier(pool)->dense;
    size_t width = (size_t)job->width;
    int64_t num_groups = ceil_div(spec->rows, ROW_GROUP);
    for (int64_t task; (task = glm53_pool_next(pool)) < num_groups * job->num_spans;) {
        int32_t span = (int32_t)(task / num_groups), row = (int32_t)(task % num_groups) * ROW_GROUP;
        int32_t rows = min_i32(ROW_GROUP, spec->rows - row), at = span * GLM53_DOT_SPAN;
        int32_t n = min_i32(GLM53_DOT_SPAN, job->width - at);
        const glm53_dense fn = {.data = spec->fn + at, .stride = width};
        const float *x = spec->x + (size_t)row * width + (size_t)at;
        float *sums = job->sums + ((size_t)span * (size_t)spec->rows + (size_t)row) * NUM_SUMS;
        kernels->dot(x, width, rows, &fn, NUM_OUT, n, sums, NUM_SUMS);
        for (int32_t r = 0; r < rows; r++) {
            sums[r * NUM_SUMS + NUM_OUT] = kernels->sum_squares(x + (size_t)r * width, n);
        }
    }
}

static void divide_columns(float c[S][S], float eps) {
    for (int32_t j = 0; j < S; j++) {
        float sum = eps;
        for (int32_t i = 0; i < S; i++) sum += c[i][j];
        for (int32_t i = 0; i < S; i++) c[i][j] /= sum;
    }
}

static void divide_rows(float c[S][S], float eps) {
    for (int32_t i = 0; i < S; i++) {
        float sum = eps;
        for (int32_t j = 0; j < S; j++) sum += c[i][j];
        for (int32_t j = 0; j < S; j++) c[i][j] /= sum;
    }
}

/* Rows through softmax, then columns, then rows and columns in turn. */
static void balance(float c[S][S], int32_t num_iterations, float eps) {
    for (int32_t i = 0; i < S; i++) {
        float top = c[i][0], sum = 0.0f;
        for (int32_t j = 1; j < S; j++) top = fmaxf(top, c[i][j]);
        for (int32_t j = 0; j < S; j++) sum += c[i][j] = expf(c[i][j] - top);
        for (int32_t j = 0; j < S; j++) c[i][j] = c[i][j] / sum + eps;
    }
    divide_columns(c, eps);
    for (int32_t i = 1; i < num_iterations; i++) {
        divide_rows(c, eps);
        divide_columns(c, eps);
    }
}

static void coefficients_of_row(const site_job *job, size_t row) {
    const glm53_mhc_job *spec = job->spec;
    float sums[NUM_SUMS] = {0};
    for (int32_t span = 0; span < job->num_spans; span++) {
        const float *part = job->sums + ((size_t)span * (size_t)spec->rows + row) * NUM_SUMS;
        for (int32_t i = 0; i < NUM_SUMS; i++) sums[i] += part[i];
    }
    float factor = 1.0f / sqrtf(sums[NUM_OUT] / (float)job->width + spec->norm_eps);
    float *pre = job->pre + row * S, *post = spec->post + row * S;
    float comb[S][S];
    for (int32_t i = 0; i < S; i++) {
        const float *m = sums + i, *base = spec->base + i;
        pre[i] = sigmoid(m[0] * factor * spec->scale[0] + base[0]) + spec->eps;
        post[i] = 2.0f * sigmoid(m[S] * factor * spec->scale[1] + base[S]);
    }
    for (int32_t i = 0; i < S * S; i++) {
        comb[i / S][i % S] = sums[2 * S + i] * factor * spec->scale[2] + spec->base[2 * S + i];
    }
    balance(comb, spec->sinkhorn_iters, spec->eps);
    memcpy(spec->comb + row * S * S, comb, sizeof comb);
}

static void site_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const site_job *job = context;
    const glm53_mhc_job *spec = job->spec;
    size_t hidden = (size_t)spec->hidden;
    sum_phase(pool, job);
    glm53_pool_barrier(pool);
    for (int64_t r; (r = glm53_pool_next(pool)) < spec->rows;) coefficients_of_row(job, (size_t)r);
    glm53_pool_barrier(pool);
    int64_t pieces = ceil_div(spec->hidden, MIX_WIDTH);
    for (int64_t task; (task = glm53_pool_next(pool)) < spec->rows * pieces;) {
        size_t r = (size_t)(task / pieces), at = (size_t)(task % pieces) * MIX_WIDTH;
        int32_t n = min_i32(MIX_WIDTH, spec->hidden - (int32_t)at);
        glm53_pool_tier(pool)->dense->mix_in(spec->x + r * S * hidden + at, hidden, job->pre + r * S, n,
                                             spec->u + r * hidden + at);
    }
}

int32_t glm53_mhc_site(glm53_pool *pool, const glm53_mhc_job *spec) {
    if (!pool || !spec || !spec->x || !spec->fn || !spec->base || !spec->scale) return GLM53_BAD_ARGUMENT;
    if (!spec->u || !spec->post || !spec->comb) return GLM53_BAD_ARGUMENT;
    if (spec->rows < 1 || spec->sinkhorn_iters < 1) return GLM53_BAD_ARGUMENT;
    if (spec->hidden < 8 || spec->hidden % 8) return GLM53_BAD_SHAPE;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    site_job job = {.spec = spec, .width = S * spec->hidden};
    job.num_spans = ceil_div(job.width, GLM53_DOT_SPAN);
    size_t sum_floats = (size_t)job.num_spans * (size_t)spec->rows * NUM_SUMS;
    size_t bytes = (sum_floats + (size_t)spec->rows * S) * sizeof(float);
    job.sums = glm53_pool_scratch(pool, bytes);
    if (job.sums) {
        job.pre = job.sums + sum_floats;
        glm53_pool_run(pool, site_main, &job, (int64_t)spec->rows * job.width * NUM_SUMS);
    }
    glm53_pool_release(pool);
    return job.sums ? GLM53_OK : GLM53_NO_MEMORY;
}

typedef struct {
    const float *x, *y, *post, *comb;
    float *out;
    int32_t rows, hidden;
} apply_job;

static void apply_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const apply_job *job = context;
    size_t hidden = (size_t)job->hidden;
    int64_t pieces = ceil_div(job->hidden, MIX_WIDTH);
    for (int64_t task; (task = glm53_pool_next(pool)) < job->rows * pieces;) {
        size_t r = (size_t)(task / pieces), at = (size_t)(task % pieces) * MIX_WIDTH,
               streams = r * S * hidden + at;
        int32_t n = min_i32(MIX_WIDTH, job->hidden - (int32_t)at);
        glm53_pool_tier(pool)->dense->mix_out(job->x + streams, hidden, job->y + r * hidden + at,
                                              job->post + r * S, job->comb + r * S * S, n,
                                              job->out + streams);
    }
}

int32_t glm53_mhc_apply(glm53_pool *pool, const float *x, const float *y, const float *post,
                        const float *comb, int32_t rows, int32_t hidden, float *out) {
    if (!pool || !x || !y || !post || !comb || !out || rows < 1) return GLM53_BAD_ARGUMENT;
    if (hidden < 8 || hidden % 8) return GLM53_BAD_SHAPE;
    apply_job job = {.x = x, .y = y, .post = post, .comb = comb, .out = out, .rows = rows, .hidden = hidden};
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    glm53_pool_run(pool, apply_main, &job, (int64_t)rows * hidden * S * (S + 1));
    glm53_pool_release(pool);
    return GLM53_OK;
}
