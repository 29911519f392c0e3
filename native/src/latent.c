/* Latent attention: which tokens a query reads, and what it makes of them. */
#include <math.h>

#include "dense.h"

/* Heads that are computed together; a task of its own where there are fewer rows than threads. */
enum { HEAD_GROUP = 16 };
/* Rows of the cache that are read for all heads of a task before the next ones: 128 KB at 512 channels. */
enum { ROW_BLOCK = 64 };

/* One thread's memory. */
typedef struct {
    const float **rows; /* (max_read): where the tokens lie that a query reads */
    float *weights;     /* (HEAD_GROUP, max_read) */
    float *pool_scores; /* (max_pools) */
    float *sorted;      /* (max_pools) */
    float *head_scores; /* (index_heads, pools per page) */
} workspace;

typedef struct {
    const glm53_latent_job *job;
    uint8_t *scratch;
    size_t workspace_bytes;
    int32_t max_read, max_pools;
    bool shares_rows; /* the head groups of a row are tasks, which repeat its choice of tokens */
} latent_context;

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

static size_t aligned(size_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

static int32_t pools_per_page(const glm53_latent_job *job) { return job->page_tokens / job->kpool; }

/* Lay a workspace out at `base`; gives its size. base may be NULL. */
static size_t lay_out(const latent_context *context, uint8_t *base, workspace *space) {
    const glm53_latent_job *job = context->job;
    size_t read = (size_t)context->max_read, pools = (size_t)context->max_pools;
    size_t sizes[] = {
        read * sizeof *space->rows,
        HEAD_GROUP * read * sizeof(float),
        pools * sizeof(float),
        pools * sizeof(float),
        (size_t)job->index_heads * (size_t)pools_per_page(job) * sizeof(float),
    };
    uint8_t *places[5];
    size_t offset = 0;
    for (size_t i = 0; i < 5; i++) {
        places[i] = base ? base + offset : NULL;
        offset += aligned(sizes[i]);
    }
    space->rows = (const float **)(void *)places[0];
    space->weights = (float *)(void *)places[1];
    space->pool_scores = (float *)(void *)places[2];
    space->sorted = (float *)(void *)places[3];
    space->head_scores = (float *)(void *)places[4];
    return offset;
}

static const float *latent_row(const glm53_latent_job *job, int32_t token) {
    size_t page = (size_t)job->page_ids[token / job->page_tokens];
    size_t row = page * (size_t)job->page_tokens + (size_t)(token % job->page_tokens);
    return job->latents + row * (size_t)job->latent;
}

/* Give the k-th largest of n numbers, k from 1, and shuffle them. NaNs may end up anywhere. */
static float kth_largest(float *x, int32_t n, int32_t k) {
    int32_t low = 0, high = n - 1, want = k - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int32_t i = low, j = high;
        while (i <= j) {
            while (i < high && x[i] > pivot) i++;
            while (j > low && x[j] < pivot) j--;
            if (i > j) break;
            float other = x[i];
            x[i++] = x[j];
            x[j--] = other;
        }
        if (want <= j) {
            high = j;
        } else if (want >= i) {
            low = i;
        } else {
            break;
        }
    }
    return x[want];
}

static void score_pools(const glm53_dense_kernels *kernels, const glm53_latent_job *job, int32_t row,
                        int32_t num_pools, workspace *space) {
    int32_t per_page = pools_per_page(job);
    size_t dim = (size_t)job->index_dim, heads = (size_t)job->index_heads;
    const float *queries = job->index_queries + (size_t)row * heads * dim;
    const float *weights = job->index_weights + (size_t)row * heads;
    for (int32_t first = 0; first < num_pools; first += per_page) {
        int32_t count = min_i32(per_page, num_pools - first);
        size_t page = (size_t)job->page_ids[first / per_page];
        glm53_dense keys = {.data = job->pooled + page * (size_t)per_page * dim, .stride = dim};
        kernels->dot(queries, dim, job->index_heads, &keys, count, job->index_dim, space->head_scores,
                     (size_t)per_page);
        for (int32_t p = 0; p < count; p++) {
            float sum = 0.0f;
            for (size_t i = 0; i < heads; i++) {
                float score = job->index_scale * space->head_scores[i * (size_t)per_page + (size_t)p];
                sum += weights[i] * (score < 0.0f ? 0.0f : score); /* a NaN stays one */
            }
            space->pool_scores[first + p] = sum;
        }
    }
}

/* List the tokens that a row reads, ascending; gives their number. */
static int32_t choose_rows(const glm53_dense_kernels *kernels, const glm53_latent_job *job, int32_t row,
                           workspace *space) {
    int32_t num_visible = job->position + row + 1, num_pools = num_visible / job->kpool;
    int32_t count = 0, first_tail = 0;
    if (job->index_queries && num_pools > job->topk_pools) {
        score_pools(kernels, job, row, num_pools, space);
        memcpy(space->sorted, space->pool_scores, (size_t)num_pools * sizeof(float));
        float cut = kth_largest(space->sorted, num_pools, job->topk_pools);
        int32_t num_above = 0;
        for (int32_t p = 0; p < num_pools; p++) num_above += space->pool_scores[p] > cut;
        int32_t ties = job->topk_pools - num_above;
        for (int32_t p = 0; p < num_pools; p++) {
            float score = space->pool_scores[p];
            if (!(score > cut || (score == cut && ties-- > 0))) continue;
            for (int32_t i = 0; i < job->kpool; i++) {
                space->rows[count++] = latent_row(job, p * job->kpool + i);
            }
        }
        first_tail = num_pools * job->kpool;
    }
    for (int32_t token = first_tail; token < num_visible; token++) {
        space->rows[count++] = latent_row(job, token);
    }
    return count;
}

static void attend(const glm53_dense_kernels *kernels, const latent_context *context, int32_t row,
                   int32_t head, int32_t heads, int32_t count, workspace *space) {
    const glm53_latent_job *job = context->job;
    size_t stride = (size_t)context->max_read, latent = (size_t)job->latent;
    size_t at = ((size_t)row * (size_t)job->heads + (size_t)head) * latent;
    float *y = job->y + at;
    for (int32_t j = 0; j < count; j += ROW_BLOCK) {
        kernels->scores_at(job->queries + at, heads, space->rows + j, min_i32(ROW_BLOCK, count - j),
                           job->latent, job->scale, space->weights + j, stride);
    }
    for (int32_t h = 0; h < heads; h++) kernels->softmax(space->weights + (size_t)h * stride, count);
    memset(y, 0, (size_t)heads * latent * sizeof *y);
    for (int32_t j = 0; j < count; j += ROW_BLOCK) {
        kernels->mix_at(space->weights + j, stride, heads, space->rows + j, min_i32(ROW_BLOCK, count - j),
                        job->latent, y);
    }
}

/* Heads [head, end) of a row, group by group. */
static void run_row(const glm53_dense_kernels *kernels, const latent_context *context, int32_t row,
                    int32_t head, int32_t end, workspace *space) {
    const glm53_latent_job *job = context->job;
    int32_t count = choose_rows(kernels, job, row, space);
    if (count == 0) { /* scores that are NaN choose nothing: let that be seen */
        size_t latent = (size_t)job->latent, first = (size_t)row * (size_t)job->heads + (size_t)head;
        for (size_t i = 0; i < (size_t)(end - head) * latent; i++) job->y[first * latent + i] = NAN;
        return;
    }
    for (; head < end; head += HEAD_GROUP) {
        attend(kernels, context, row, head, min_i32(HEAD_GROUP, end - head), count, space);
    }
}

static void latent_main(glm53_pool *pool, void *argument, int32_t thread) {
    const latent_context *context = argument;
    const glm53_latent_job *job = context->job;
    const glm53_dense_kernels *kernels = glm53_pool_tier(pool)->dense;
    workspace space;
    lay_out(context, context->scratch + (size_t)thread * context->workspace_bytes, &space);
    int32_t heads = context->shares_rows ? HEAD_GROUP : job->heads;
    int64_t groups = (job->heads + heads - 1) / heads;
    for (int64_t task; (task = glm53_pool_next(pool)) < job->rows * groups;) {
        int32_t head = (int32_t)(task % groups) * heads;
        run_row(kernels, context, (int32_t)(task / groups), head, min_i32(head + heads, job->heads), &space);
    }
}

static bool is_width(int32_t width) { return width >= 8 && width % 8 == 0 && width <= GLM53_DOT_SPAN; }

static int32_t check(const glm53_latent_job *job) {
    if (!job || !job->queries || !job->latents || !job->page_ids || !job->y) return GLM53_BAD_ARGUMENT;
    if (job->rows < 1 || job->position < 0 || job->heads < 1) return GLM53_BAD_ARGUMENT;
    if (!is_width(job->latent) || job->kpool < 1) return GLM53_BAD_SHAPE;
    if (job->page_tokens < job->kpool || job->page_tokens % job->kpool) return GLM53_BAD_SHAPE;
    if (!job->index_queries) return GLM53_OK;
    if (!job->index_weights || !job->pooled || job->topk_pools < 1) return GLM53_BAD_ARGUMENT;
    return is_width(job->index_dim) && job->index_heads >= 1 ? GLM53_OK : GLM53_BAD_SHAPE;
}

int32_t glm53_latent_attention(glm53_pool *pool, const glm53_latent_job *job) {
    if (!pool) return GLM53_BAD_ARGUMENT;
    int32_t status = check(job);
    if (status != GLM53_OK) return status;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    latent_context context = {.job = job, .shares_rows = job->rows < glm53_pool_threads(pool)};
    int32_t num_tokens = job->position + job->rows;
    context.max_read = num_tokens;
    if (job->index_queries) {
        context.max_pools = num_tokens / job->kpool;
        int64_t chosen = ((int64_t)job->topk_pools + 1) * job->kpool;
        if (chosen < num_tokens) context.max_read = (int32_t)chosen;
    }
    workspace unused;
    context.workspace_bytes = lay_out(&context, NULL, &unused);
    size_t num_bytes = context.workspace_bytes * (size_t)glm53_pool_threads(pool);
    context.scratch = glm53_pool_scratch(pool, num_bytes);
    if (context.scratch) {
        int64_t work = (int64_t)job->rows * job->heads * context.max_read * job->latent * 2;
        glm53_pool_run(pool, latent_main, &context, work);
    }
    glm53_pool_release(pool);
    return context.scratch ? GLM53_OK : GLM53_NO_MEMORY;
}
