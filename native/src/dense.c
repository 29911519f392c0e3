/* The public functions of the dense kernels: checks, tasks, and the little that is the same in every
 * instruction set. */
#include "dense.h"

#include <math.h>

static const glm53_dense_kernels *kernels_of(const glm53_pool *pool) { return glm53_pool_tier(pool)->dense; }

static bool is_width(int32_t width) { return width >= 8 && width % 8 == 0; }

static int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* Run a job that needs no scratch. */
static int32_t run_job(glm53_pool *pool, glm53_job_fn job, void *context, int64_t work) {
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    glm53_pool_run(pool, job, context, work);
    glm53_pool_release(pool);
    return GLM53_OK;
}

/* ---- plain linear ---- */

enum { OUT_GROUP = 16, ROW_GROUP = 64 };

typedef struct {
    glm53_dense w;
    const float *x;
    float *y;
    float *temps; /* (threads, ROW_GROUP, OUT_GROUP) */
    int32_t rows, in, out;
} plain_job;

/* Rows [r, r + rows) times outputs [o, o + outs), span after span of the inputs. */
static void plain_tile(const glm53_dense_kernels *kernels, const plain_job *job, int32_t r, int32_t rows,
                       int32_t o, int32_t outs, float *temp) {
    size_t in = (size_t)job->in, out = (size_t)job->out;
    float *y = job->y + (size_t)r * out + (size_t)o;
    for (int32_t i = 0; i < job->in; i += GLM53_DOT_SPAN) {
        size_t element = (size_t)o * in + (size_t)i;
        glm53_dense w = job->w;
        w.data = w.is_f16 ? (const void *)((const uint16_t *)w.data + element)
                          : (const void *)((const float *)w.data + element);
        const float *x = job->x + (size_t)r * in + (size_t)i;
        int32_t n = min_i32(GLM53_DOT_SPAN, job->in - i);
        if (i == 0) {
            kernels->dot(x, in, rows, &w, outs, n, y, out);
            continue;
        }
        kernels->dot(x, in, rows, &w, outs, n, temp, OUT_GROUP);
        for (int32_t a = 0; a < rows; a++) {
            for (int32_t b = 0; b < outs; b++) y[(size_t)a * out + (size_t)b] += temp[a * OUT_GROUP + b];
        }
    }
}

static void plain_main(glm53_pool *pool, void *context, int32_t thread) {
    const plain_job *job = context;
    float *temp = job->temps + (size_t)thread * ROW_GROUP * OUT_GROUP;
    int64_t num_groups = (job->out + OUT_GROUP - 1) / OUT_GROUP;
    for (int64_t group; (group = glm53_pool_next(pool)) < num_groups;) {
        int32_t o = (int32_t)group * OUT_GROUP, outs = min_i32(OUT_GROUP, job->out - o);
        for (int32_t r = 0; r < job->rows; r += ROW_GROUP) {
            plain_tile(kernels_of(pool), job, r, min_i32(ROW_GROUP, job->rows - r), o, outs, temp);
        }
    }
}

int32_t glm53_plain_linear(glm53_pool *pool, const void *w, int32_t is_f16, int32_t in_features,
                           int32_t out_features, const float *x, int32_t rows, float *y) {
    if (!pool || !w || !x || !y || rows < 1) return GLM53_BAD_ARGUMENT;
    if (!is_width(in_features) || out_features < 1) return GLM53_BAD_SHAPE;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    plain_job job = {.x = x, .y = y, .rows = rows, .in = in_features, .out = out_features};
    job.w = (glm53_dense){.data = w, .stride = (size_t)in_features, .is_f16 = is_f16 != 0};
    size_t temp_bytes = (size_t)glm53_pool_threads(pool) * ROW_GROUP * OUT_GROUP * sizeof(float);
    job.temps = glm53_pool_scratch(pool, temp_bytes);
    if (job.temps) glm53_pool_run(pool, plain_main, &job, (int64_t)rows * in_features * out_features);
    glm53_pool_release(pool);
    return job.temps ? GLM53_OK : GLM53_NO_MEMORY;
}

/* ---- RMS norm ---- */

typedef struct {
    const float *x, *weight;
    float *y;
    int32_t rows, width;
    float eps;
} norm_job;

static void norm_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const norm_job *job = context;
    const glm53_dense_kernels *kernels = kernels_of(pool);
    for (int64_t r; (r = glm53_pool_next(pool)) < job->rows;) {
        const float *x = job->x + (size_t)r * (size_t)job->width;
        float mean = kernels->sum_squares(x, job->width) / (float)job->width;
        kernels->scale(x, 1.0f / sqrtf(mean + job->eps), job->weight, job->width,
                       job->y + (size_t)r * (size_t)job->width);
    }
}

int32_t glm53_rms_norm(glm53_pool *pool, const float *x, const float *weight, int32_t rows, int32_t width,
                       float eps, float *y) {
    if (!pool || !x || !y || rows < 1) return GLM53_BAD_ARGUMENT;
    if (!is_width(width)) return GLM53_BAD_SHAPE;
    norm_job job = {.x = x, .weight = weight, .y = y, .rows = rows, .width = width, .eps = eps};
    return run_job(pool, norm_main, &job, (int64_t)rows * width * 2);
}

/* ---- KDA and convolution ---- */

static void kda_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const glm53_kda_job *job = context;
    enum { D = GLM53_KDA_DIM };
    size_t heads = (size_t)job->heads;
    for (int64_t task; (task = glm53_pool_next(pool)) < (int64_t)job->num_sequences * job->heads;) {
        size_t sequence = (size_t)task / heads, head = (size_t)task % heads;
        float *state = job->states[sequence] + head * D * D;
        for (size_t t = 0; t < (size_t)job->tokens; t++) {
            size_t at = (sequence * (size_t)job->tokens + t) * heads + head;
            kernels_of(pool)->kda_token(state, job->q + at * D, job->k + at * D, job->v + at * D,
                                        job->g + at * D, job->beta[at], job->o + at * D);
        }
    }
}

static bool has_states(float *const *states, int32_t num_sequences) {
    if (!states || num_sequences < 1) return false;
    for (int32_t i = 0; i < num_sequences; i++) {
        if (!states[i]) return false;
    }
    return true;
}

int32_t glm53_kda(glm53_pool *pool, const glm53_kda_job *job) {
    if (!pool || !job || !job->q || !job->k || !job->v || !job->g || !job->beta || !job->o)
        return GLM53_BAD_ARGUMENT;
    if (!has_states(job->states, job->num_sequences) || job->tokens < 1) return GLM53_BAD_ARGUMENT;
    if (job->heads < 1) return GLM53_BAD_SHAPE;
    int64_t steps = (int64_t)job->num_sequences * job->tokens * job->heads;
    return run_job(pool, kda_main, (void *)(uintptr_t)job, steps * 4 * GLM53_KDA_DIM * GLM53_KDA_DIM);
}

enum { CHANNEL_GROUP = 256 };

static void conv_task(const glm53_dense_kernels *kernels, const glm53_conv_job *job, size_t sequence,
                      int32_t c) {
    size_t channels = (size_t)job->channels, tokens = (size_t)job->tokens;
    int32_t n = min_i32(CHANNEL_GROUP, job->channels - c);
    float *state = job->states[sequence] + c;
    const float *x = job->x + sequence * tokens * channels + (size_t)c;
    float *y = job->y + sequence * tokens * channels + (size_t)c;
    enum { OLD = GLM53_CONV_TAPS - 1 };
    for (size_t t = 0; t < tokens; t++) {
        const float *taps[GLM53_CONV_TAPS];
        for (size_t i = 0; i < GLM53_CONV_TAPS; i++) {
            taps[i] = t + i < OLD ? state + (t + i) * channels : x + (t + i - OLD) * channels;
        }
        kernels->conv_token(taps, job->weight + c, channels, n, y + t * channels);
    }
    for (size_t i = 0; i < OLD;
         i++) { /* ascending: a short run moves older columns down before it overwrites them */
        const float *source =
            tokens + i < OLD ? state + (tokens + i) * channels : x + (tokens + i - OLD) * channels;
        memmove(state + i * channels, source, (size_t)n * sizeof *state);
    }
}

static void conv_main(glm53_pool *pool, void *context, int32_t thread) {
    (void)thread;
    const glm53_conv_job *job = context;
    int64_t groups = (job->channels + CHANNEL_GROUP - 1) / CHANNEL_GROUP;
    for (int64_t task; (task = glm53_pool_next(pool)) < job->num_sequences * groups;) {
        conv_task(kernels_of(pool), job, (size_t)(task / groups), (int32_t)(task % groups) * CHANNEL_GROUP);
    }
}

int32_t glm53_conv(glm53_pool *pool, const glm53_conv_job *job) {
    if (!pool || !job || !job->x || !job->weight || !job->y) return GLM53_BAD_ARGUMENT;
    if (!has_states(job->states, job->num_sequences) || job->tokens < 1) return GLM53_BAD_ARGUMENT;
    if (!is_width(job->channels)) return GLM53_BAD_SHAPE;
    int64_t columns = (int64_t)job->num_sequences * job->tokens * job->channels;
    return run_job(pool, conv_main, (void *)(uintptr_t)job, columns * 16);
}
