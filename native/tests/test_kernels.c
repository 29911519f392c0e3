/* Every kernel of every instruction set in buffers of exact size, against the scalar one: run it under ASan
 * and UBSan. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

static const int32_t ROWS[] = {1, 2, 3, 4, 5, 8, 9, 13};
enum { NUM_ROWS = sizeof ROWS / sizeof *ROWS };

static void compare_decode(glm53_pool *pool, glm53_pool *scalar, const glm53_matrix *matrix) {
    size_t count = (size_t)matrix->in_features * (size_t)matrix->out_features;
    float *a = nan_floats(count), *b = nan_floats(count);
    CHECK(glm53_decode(pool, matrix, a) == GLM53_OK);
    CHECK(glm53_decode(scalar, matrix, b) == GLM53_OK);
    CHECK(memcmp(a, b, count * sizeof *a) == 0);
    free(a);
    free(b);
}

static void compare_linear(glm53_pool *pool, glm53_pool *scalar, const glm53_matrix *matrix,
                           int32_t precision) {
    uint32_t seed = 7;
    for (int32_t i = 0; i < NUM_ROWS; i++) {
        size_t count = (size_t)ROWS[i] * (size_t)matrix->out_features;
        float *x = random_floats(&seed, (size_t)ROWS[i] * (size_t)matrix->in_features);
        float *a = nan_floats(count), *b = nan_floats(count);
        CHECK(glm53_linear(pool, matrix, x, ROWS[i], precision, a) == GLM53_OK);
        CHECK(glm53_linear(scalar, matrix, x, ROWS[i], precision, b) == GLM53_OK);
        CHECK(difference(a, b, count) < 1e-5); /* both round: twice the bound against exact arithmetic */
        free(x);
        free(a);
        free(b);
    }
}

static void test_every_format(glm53_pool *pool, glm53_pool *scalar) {
    uint32_t seed = 1;
    for (int32_t codebook = 0; codebook <= GLM53_CODEBOOK_MUL1; codebook++) {
        for (int32_t bits_x2 = 2; bits_x2 <= 16; bits_x2++) {
            glm53_matrix matrix = random_matrix(&seed, 128, 256, bits_x2, codebook);
            if (glm53_matrix_check(&matrix) == GLM53_OK) {
                compare_decode(pool, scalar, &matrix);
                compare_linear(pool, scalar, &matrix, GLM53_EXACT32);
                compare_linear(pool, scalar, &matrix, GLM53_FAST16);
            }
            free_matrix(&matrix);
        }
    }
}

/* Weights at an odd multiple of two bytes, ending where the allocation ends. */
static void test_unaligned_weights(glm53_pool *pool, glm53_pool *scalar) {
    uint32_t seed = 2;
    glm53_matrix matrix = random_matrix(&seed, 128, 128, 6, GLM53_CODEBOOK_MUL1);
    enum { HALVES = 8 * 8 * 48 };
    uint16_t *room = items(HALVES + 1, sizeof *room);
    memcpy(room + 1, matrix.trellis, HALVES * sizeof *room);
    glm53_matrix moved = matrix;
    moved.trellis = room + 1;
    compare_decode(pool, scalar, &moved);
    compare_linear(pool, scalar, &moved, GLM53_EXACT32);
    compare_linear(pool, scalar, &moved, GLM53_FAST16);
    free(room);
    free_matrix(&matrix);
}

/* The sanitizers do not see masked vector loads; a page that cannot be read sees every access to it. */
static void test_nothing_outside_the_weights_is_read(glm53_pool *pool) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint32_t seed = 9;
    float *x = random_floats(&seed, 3 * 128), *a = nan_floats(3 * 128), *b = nan_floats(3 * 128);
    for (int32_t bits_x2 = 2; bits_x2 <= 16; bits_x2++) {
        glm53_matrix matrix = random_matrix(&seed, 128, 128, bits_x2, GLM53_CODEBOOK_MUL1);
        if (glm53_matrix_check(&matrix) == GLM53_OK) {
            size_t bytes = 8 * 8 * 16 * (size_t)bits_x2, room = (bytes + page - 1) / page * page;
            uint8_t *map =
                mmap(NULL, room + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(map != MAP_FAILED);
            CHECK(mprotect(map, page, PROT_NONE) == 0 && mprotect(map + page + room, page, PROT_NONE) == 0);
            for (int32_t at_end = 0; at_end <= 1; at_end++) {
                glm53_matrix moved = matrix;
                uint8_t *weights = map + page + (at_end ? room - bytes : 0);
                memcpy(weights, matrix.trellis, bytes);
                moved.trellis = (const uint16_t *)(void *)weights;
                for (int32_t i = 0; i < 4; i++) { /* one row and three, exact and fast */
                    int32_t rows = 1 + (i & 2), precision = i & 1 ? GLM53_FAST16 : GLM53_EXACT32;
                    CHECK(glm53_linear(pool, &moved, x, rows, precision, a) == GLM53_OK);
                    CHECK(glm53_linear(pool, &matrix, x, rows, precision, b) == GLM53_OK);
                    CHECK(memcmp(a, b, (size_t)rows * 128 * sizeof *a) == 0);
                }
            }
            munmap(map, room + 2 * page);
        }
        free_matrix(&matrix);
    }
    free(x);
    free(a);
    free(b);
}

/* A part and the rest of an expert add up to the whole; all of it as a part has the same bits. */
static void test_experts_in_part(glm53_pool *pool) {
    enum { HIDDEN = 128, BLOCKS = 19, INNER = 128 * BLOCKS, EXPERTS = 3, PICKS = 2, FEW = 3 };
    enum { COUNT = FEW * HIDDEN };
    static const int32_t CUTS[] = {1, 2, 7, 18, BLOCKS}; /* spans of down are two blocks, stages four */
    uint32_t seed = 21;
    glm53_expert table[EXPERTS];
    for (int32_t e = 0; e < EXPERTS; e++) {
        table[e].gate = random_matrix(&seed, HIDDEN, INNER, 6, GLM53_CODEBOOK_MUL1);
        table[e].up = random_matrix(&seed, HIDDEN, INNER, 6, GLM53_CODEBOOK_MUL1);
        table[e].down = random_matrix(&seed, INNER, HIDDEN, 6, GLM53_CODEBOOK_MUL1);
    }
    const int32_t picks[FEW * PICKS] = {0, 1, 1, -1, 2, 1}, alone[FEW * PICKS] = {-1, 1, 1, -1, -1, 1};
    float *x = random_floats(&seed, COUNT), *weights = random_floats(&seed, FEW * PICKS);
    float *whole = nan_floats(COUNT), *low = nan_floats(COUNT), *high = nan_floats(COUNT);
    for (int32_t precision = GLM53_EXACT32; precision <= GLM53_FAST16; precision++) {
        glm53_expert_job job = {.table = table, .x = x, .picks = picks, .weights = weights, .y = whole};
        job.num_experts = EXPERTS;
        job.rows = FEW;
        job.num_picks = PICKS;
        job.limit = 0.5f;
        job.precision = precision;
        CHECK(glm53_experts(pool, &job) == GLM53_OK);
        job.part_expert = 1;
        for (size_t i = 0; i < sizeof CUTS / sizeof *CUTS; i++) {
            int32_t cut = CUTS[i];
            job.picks = picks;
            job.part_begin = 0;
            job.part_end = cut;
            job.y = low;
            CHECK(glm53_experts(pool, &job) == GLM53_OK);
            if (cut == BLOCKS) break;
            job.picks = alone;
            job.part_begin = cut;
            job.part_end = BLOCKS;
            job.y = high;
            CHECK(glm53_experts(pool, &job) == GLM53_OK);
            for (size_t j = 0; j < COUNT; j++) high[j] += low[j];
            CHECK(difference(high, whole, COUNT) < 1e-5);
            CHECK(difference(low, whole, COUNT) > 1e-2);
        }
        CHECK(memcmp(low, whole, COUNT * sizeof *low) == 0);
        job.part_end = BLOCKS + 1;
        CHECK(glm53_experts(pool, &job) == GLM53_BAD_ARGUMENT);
        job.part_begin = job.part_end = 2;
        CHECK(glm53_experts(pool, &job) == GLM53_BAD_ARGUMENT);
        job.part_begin = 0;
        job.part_expert = EXPERTS;
        CHECK(glm53_experts(pool, &job) == GLM53_BAD_PICK);
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        free_matrix(&table[e].gate);
        free_matrix(&table[e].up);
        free_matrix(&table[e].down);
    }
    free(x);
    free(weights);
    free(whole);
    free(low);
    free(high);
}

static void test_experts(glm53_pool *pool, glm53_pool *scalar) {
    enum { HIDDEN = 256, INNER = 128, EXPERTS = 3, PICKS = 3 };
    uint32_t seed = 3;
    glm53_expert table[EXPERTS];
    for (int32_t e = 0; e < EXPERTS; e++) {
        table[e].gate = random_matrix(&seed, HIDDEN, INNER, 6, GLM53_CODEBOOK_MUL1);
        table[e].up = random_matrix(&seed, HIDDEN, INNER, 5, GLM53_CODEBOOK_MUL1);
        table[e].down = random_matrix(&seed, INNER, HIDDEN, 8, GLM53_CODEBOOK_MCG);
    }
    for (int32_t i = 0; i < NUM_ROWS; i++) {
        size_t rows = (size_t)ROWS[i], count = rows * HIDDEN;
        int32_t *picks = items(rows * PICKS, sizeof *picks);
        for (size_t p = 0; p < rows * PICKS; p++)
            picks[p] = (int32_t)(next_random(&seed) % (EXPERTS + 1)) - 1;
        picks[0] = 1;
        float *x = random_floats(&seed, count), *weights = random_floats(&seed, rows * PICKS);
        float *a = nan_floats(count), *b = nan_floats(count);
        glm53_expert_job job = {.table = table, .x = x, .picks = picks, .weights = weights, .y = a};
        job.num_experts = EXPERTS;
        job.rows = ROWS[i];
        job.num_picks = PICKS;
        job.limit = 0.5f;
        job.clamp = i % 2 ? GLM53_CLAMP_GATE : GLM53_CLAMP_ACTIVATION;
        CHECK(glm53_experts(pool, &job) == GLM53_OK);
        job.y = b;
        CHECK(glm53_experts(scalar, &job) == GLM53_OK);
        CHECK(difference(a, b, count) < 1e-5);
        picks[rows * PICKS - 1] = EXPERTS;
        CHECK(glm53_experts(pool, &job) == GLM53_BAD_PICK);
        free(picks);
        free(x);
        free(weights);
        free(a);
        free(b);
    }
    for (int32_t e = 0; e < EXPERTS; e++) {
        free_matrix(&table[e].gate);
        free_matrix(&table[e].up);
        free_matrix(&table[e].down);
    }
}

static void test_plain_linear(glm53_pool *pool, glm53_pool *scalar) {
    uint32_t seed = 4;
    static const int32_t WIDTHS[] = {8, 40, 1032};
    for (int32_t i = 0; i < NUM_ROWS * 3; i++) {
        int32_t rows = ROWS[i % NUM_ROWS], width = WIDTHS[i / NUM_ROWS], outs = 1 + i;
        size_t count = (size_t)rows * (size_t)outs;
        float *x = random_floats(&seed, (size_t)rows * (size_t)width);
        float *w = random_floats(&seed, (size_t)outs * (size_t)width);
        uint16_t *h = random_scales(&seed, (size_t)outs * (size_t)width);
        float *a = nan_floats(count), *b = nan_floats(count);
        CHECK(glm53_plain_linear(pool, w, 0, width, outs, x, rows, a) == GLM53_OK);
        CHECK(glm53_plain_linear(scalar, w, 0, width, outs, x, rows, b) == GLM53_OK);
        CHECK(difference(a, b, count) < 1e-4); /* few sums of random signs may nearly cancel */
        CHECK(glm53_plain_linear(pool, h, 1, width, outs, x, rows, a) == GLM53_OK);
        CHECK(glm53_plain_linear(scalar, h, 1, width, outs, x, rows, b) == GLM53_OK);
        CHECK(difference(a, b, count) < 1e-4);
        free(x);
        free(w);
        free(h);
        free(a);
        free(b);
    }
}

static void test_norm_and_streams(glm53_pool *pool, glm53_pool *scalar) {
    enum { N = 1032, R = 3 };
    uint32_t seed = 5;
    float *x = random_floats(&seed, R * 4 * N), *fn = random_floats(&seed, 24 * 4 * N);
    float *base = random_floats(&seed, 24), *scale = random_floats(&seed, 3),
          *y = random_floats(&seed, R * N);
    float *u[2], *post[2], *comb[2], *out[2], *norm[2];
    glm53_pool *pools[2] = {pool, scalar};
    for (int32_t i = 0; i < 2; i++) {
        u[i] = nan_floats(R * N);
        post[i] = nan_floats(R * 4);
        comb[i] = nan_floats(R * 16);
        out[i] = nan_floats(R * 4 * N);
        norm[i] = nan_floats(R * N);
        glm53_mhc_job job = {.x = x, .fn = fn, .base = base, .scale = scale, .u = u[i], .post = post[i]};
        job.comb = comb[i];
        job.rows = R;
        job.hidden = N;
        job.sinkhorn_iters = 20;
        job.norm_eps = job.eps = 1e-6f;
        CHECK(glm53_mhc_site(pools[i], &job) == GLM53_OK);
        CHECK(glm53_mhc_apply(pools[i], x, y, post[i], comb[i], R, N, out[i]) == GLM53_OK);
        CHECK(glm53_rms_norm(pools[i], y, x, R, N, 1e-5f, norm[i]) == GLM53_OK);
    }
    CHECK(difference(u[0], u[1], R * N) < 1e-5);
    CHECK(difference(comb[0], comb[1], R * 16) < 1e-4);
    CHECK(difference(out[0], out[1], R * 4 * N) < 1e-4);
    CHECK(difference(norm[0], norm[1], R * N) < 1e-5);
    for (int32_t i = 0; i < 2; i++) {
        free(u[i]);
        free(post[i]);
        free(comb[i]);
        free(out[i]);
        free(norm[i]);
    }
    free(x);
    free(fn);
    free(base);
    free(scale);
    free(y);
}

static void test_recurrences(glm53_pool *pool, glm53_pool *scalar) {
    enum { HEADS = 2, TOKENS = 3, D = 128, CHANNELS = 264 };
    uint32_t seed = 6;
    size_t count = HEADS * TOKENS * D;
    float *q = random_floats(&seed, count), *k = random_floats(&seed, count),
          *v = random_floats(&seed, count);
    float *g = random_floats(&seed, count), *beta = random_floats(&seed, HEADS * TOKENS);
    for (size_t i = 0; i < count; i++) {
        k[i] *= 0.1f;
        g[i] -= 1.0f;
    }
    float *x = random_floats(&seed, TOKENS * CHANNELS), *weight = random_floats(&seed, 4 * CHANNELS);
    float *o[2], *y[2], *state[2], *columns[2];
    glm53_pool *pools[2] = {pool, scalar};
    for (int32_t i = 0; i < 2; i++) {
        seed = 60;
        state[i] = random_floats(&seed, HEADS * D * D);
        columns[i] = random_floats(&seed, 3 * CHANNELS);
        o[i] = nan_floats(count);
        y[i] = nan_floats(TOKENS * CHANNELS);
        glm53_kda_job kda = {.states = &state[i], .q = q, .k = k, .v = v, .g = g, .beta = beta, .o = o[i]};
        kda.num_sequences = 1;
        kda.tokens = TOKENS;
        kda.heads = HEADS;
        CHECK(glm53_kda(pools[i], &kda) == GLM53_OK);
        glm53_conv_job conv = {
            .states = &columns[i], .x = x, .weight = weight, .y = y[i], .num_sequences = 1};
        conv.tokens = TOKENS;
        conv.channels = CHANNELS;
        CHECK(glm53_conv(pools[i], &conv) == GLM53_OK);
    }
    CHECK(difference(o[0], o[1], count) < 1e-5);
    CHECK(difference(state[0], state[1], HEADS * D * D) < 1e-5);
    CHECK(difference(y[0], y[1], TOKENS * CHANNELS) < 1e-5);
    CHECK(memcmp(columns[0], x, 3 * CHANNELS * sizeof *x) == 0);
    float *buffers[] = {q,    k,    v,    g,        beta,     x,          weight,    o[0],
                        o[1], y[0], y[1], state[0], state[1], columns[0], columns[1]};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}

/* Pages in an order of their own, the cache cut off after the last row that may be read. */
static void test_latent_attention(glm53_pool *pool, glm53_pool *scalar) {
    enum {
        HEADS = 19,
        LATENT = 40,
        ROWS = 7,
        POSITION = 90,
        PAGE = 16,
        KPOOL = 4,
        DIM = 24,
        INDEX_HEADS = 3
    };
    enum { PAGES = (POSITION + ROWS + PAGE - 1) / PAGE };
    static const int64_t pages[PAGES] = {3, 0, 5, 1, 6, 2, 4};
    uint32_t seed = 11;
    float *latents = random_floats(&seed, (size_t)PAGES * PAGE * LATENT);
    float *pooled = random_floats(&seed, (size_t)PAGES * PAGE / KPOOL * DIM);
    float *queries = random_floats(&seed, ROWS * HEADS * LATENT);
    float *index_queries = random_floats(&seed, ROWS * INDEX_HEADS * DIM);
    float *index_weights = random_floats(&seed, ROWS * INDEX_HEADS);
    glm53_pool *pools[2] = {pool, scalar};
    for (int32_t topk = 0; topk <= 30; topk += 5) { /* 0: no indexer; from 25 on all pools are read */
        float *y[2];
        for (int32_t i = 0; i < 2; i++) {
            y[i] = nan_floats(ROWS * HEADS * LATENT);
            glm53_latent_job job = {.queries = queries, .latents = latents, .pooled = pooled, .y = y[i]};
            job.index_queries = topk ? index_queries : NULL;
            job.index_weights = index_weights;
            job.page_ids = pages;
            job.rows = ROWS;
            job.position = POSITION;
            job.heads = HEADS;
            job.latent = LATENT;
            job.page_tokens = PAGE;
            job.kpool = KPOOL;
            job.topk_pools = topk;
            job.index_heads = INDEX_HEADS;
            job.index_dim = DIM;
            job.scale = job.index_scale = 0.2f;
            CHECK(glm53_latent_attention(pools[i], &job) == GLM53_OK);
            job.latent = 12;
            CHECK(glm53_latent_attention(pools[i], &job) == GLM53_BAD_SHAPE);
            job.latent = LATENT;
            job.rows = 0;
            CHECK(glm53_latent_attention(pools[i], &job) == GLM53_BAD_ARGUMENT);
        }
        CHECK(difference(y[0], y[1], ROWS * HEADS * LATENT) < 1e-5);
        free(y[0]);
        free(y[1]);
    }
    CHECK(glm53_latent_attention(pool, NULL) == GLM53_BAD_ARGUMENT);
    float *buffers[] = {latents, pooled, queries, index_queries, index_weights};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
}

static float largest_of(const float *x, int32_t n) {
    float largest = x[0];
    for (int32_t i = 1; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* Rows of exact size: one id, partial blocks, one group of maxima, several, and eight times as many. */
static void test_sampler(int32_t isa) {
    const int32_t sizes[] = {1, 7, 127, 128, 129, 1000, 2048, 3001, 17000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        int32_t n = sizes[s];
        uint32_t seed = 11;
        float *x = random_floats(&seed, (size_t)n);
        for (int32_t i = 0; i < n; i += 3) x[i] *= 8.0f;
        glm53_sampler *samplers[2];
        CHECK(glm53_sampler_create(n, GLM53_ISA_SCALAR, &samplers[0]) == GLM53_OK);
        CHECK(glm53_sampler_create(n, isa, &samplers[1]) == GLM53_OK);
        const int32_t top_ks[] = {0, 1, 40, 2000};
        for (size_t k = 0; k < sizeof top_ks / sizeof *top_ks; k++) {
            for (int32_t u = 0; u < 8; u++) {
                glm53_filters filters = {.temperature = u & 1 ? 0.5 : 3.0, .top_k = top_ks[k]};
                filters.top_p = u & 2 ? 0.9 : 1.0;
                filters.min_p = u & 4 ? 0.01 : 0.0;
                int32_t ids[2] = {-1, -2};
                for (int32_t i = 0; i < 2; i++) {
                    CHECK(glm53_sampler_draw(samplers[i], x, n, largest_of(x, n), &filters, u / 8.0,
                                             &ids[i]) == GLM53_OK);
                }
                CHECK(ids[0] == ids[1] && ids[0] >= 0 && ids[0] < n);
            }
        }
        double totals[2];
        for (int32_t i = 0; i < 2; i++) {
            CHECK(glm53_sampler_total(samplers[i], x, n, largest_of(x, n), &totals[i]) == GLM53_OK);
        }
        CHECK(memcmp(&totals[0], &totals[1], sizeof(double)) == 0);
        int32_t count = n > 20 ? 20 : n, *ids = items((size_t)count, sizeof *ids);
        CHECK(glm53_sampler_top(samplers[1], x, n, count, ids) == GLM53_OK);
        for (int32_t i = 1; i < count; i++) CHECK(ids[i - 1] < ids[i]);
        free(ids);
        for (int32_t i = 0; i < n; i++)
            x[i] = NAN; /* refused by the caller; here nothing may be out of bounds */
        glm53_filters filters = {.temperature = 1.0, .top_p = 0.5, .top_k = 5};
        int32_t id = -1;
        CHECK(glm53_sampler_draw(samplers[1], x, n, NAN, &filters, 0.5, &id) == GLM53_OK);
        CHECK(id >= 0 && id < n);
        for (int32_t i = 0; i < 2; i++) glm53_sampler_destroy(samplers[i]);
        free(x);
    }
}

static void test_sampler_arguments_are_checked(void) {
    const glm53_filters good = {.temperature = 1.0, .top_p = 1.0};
    const glm53_filters bad[] = {{.temperature = 0.0, .top_p = 1.0},
                                 {.temperature = NAN, .top_p = 1.0},
                                 {.temperature = 1.0, .top_p = 1.5},
                                 {.temperature = 1.0, .top_p = 1.0, .min_p = -0.1},
                                 {.temperature = 1.0, .top_p = 1.0, .top_k = -1}};
    const float x[4] = {0};
    int32_t id;
    double total;
    glm53_sampler *sampler;
    CHECK(glm53_sampler_create(4, 9, &sampler) == GLM53_NO_ISA && !sampler);
    CHECK(glm53_sampler_create(0, GLM53_ISA_AUTO, &sampler) == GLM53_BAD_ARGUMENT && !sampler);
    CHECK(glm53_sampler_create(4, GLM53_ISA_AUTO, NULL) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_create(4, GLM53_ISA_AUTO, &sampler) == GLM53_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(glm53_sampler_draw(sampler, x, 4, 0.0f, &bad[i], 0.5, &id) == GLM53_BAD_ARGUMENT);
    }
    CHECK(glm53_sampler_draw(sampler, x, 4, 0.0f, &good, 1.0, &id) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_draw(sampler, x, 5, 0.0f, &good, 0.5, &id) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_draw(sampler, NULL, 4, 0.0f, &good, 0.5, &id) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_draw(sampler, x, 4, 0.0f, NULL, 0.5, &id) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_total(sampler, x, 0, 0.0f, &total) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_top(sampler, x, 4, 5, &id) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_sampler_top(sampler, x, 4, 0, &id) == GLM53_BAD_ARGUMENT);
    glm53_sampler_destroy(sampler);
    glm53_sampler_destroy(NULL);
}

static void test_arguments_are_checked(glm53_pool *pool) {
    uint32_t seed = 8;
    glm53_matrix good = random_matrix(&seed, 128, 128, 6, GLM53_CODEBOOK_MUL1), bad = good;
    float x[128] = {0}, y[128];
    CHECK(glm53_linear(NULL, &good, x, 1, GLM53_EXACT32, y) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_linear(pool, &good, NULL, 1, GLM53_EXACT32, y) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_linear(pool, &good, x, 0, GLM53_EXACT32, y) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_linear(pool, &good, x, 1, 2, y) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_linear(pool, NULL, x, 1, GLM53_EXACT32, y) == GLM53_BAD_ARGUMENT);
    bad.in_features = 192;
    CHECK(glm53_linear(pool, &bad, x, 1, GLM53_EXACT32, y) == GLM53_BAD_SHAPE);
    bad = good;
    bad.bits_x2 = 18;
    CHECK(glm53_linear(pool, &bad, x, 1, GLM53_EXACT32, y) == GLM53_BAD_CODEBOOK);
    bad.bits_x2 = 5;
    bad.codebook = GLM53_CODEBOOK_MCG;
    CHECK(glm53_decode(pool, &bad, y) == GLM53_BAD_CODEBOOK);
    CHECK(glm53_hadamard(pool, x, 1, 64, y) == GLM53_BAD_SHAPE);
    CHECK(glm53_rms_norm(pool, x, NULL, 1, 12, 0.0f, y) == GLM53_BAD_SHAPE);
    CHECK(glm53_experts(pool, NULL) == GLM53_BAD_ARGUMENT);
    CHECK(glm53_kda(pool, NULL) == GLM53_BAD_ARGUMENT);
    glm53_pool *none;
    glm53_pool_config config = {.num_threads = 0};
    CHECK(glm53_pool_create(&config, &none) == GLM53_BAD_ARGUMENT && !none);
    CHECK(glm53_pool_create(NULL, &none) == GLM53_BAD_ARGUMENT);
    for (int32_t status = -1; status <= GLM53_BUSY + 1; status++) CHECK(glm53_status_text(status)[0]);
    glm53_pool_destroy(NULL);
    free_matrix(&good);
}

int main(void) {
    glm53_pool *scalar = make_pool(1, GLM53_ISA_SCALAR);
    for (int32_t isa = GLM53_ISA_SCALAR; isa <= GLM53_ISA_AMX; isa++) {
        if (!(glm53_isa_mask() >> isa & 1)) continue;
        glm53_pool *pool = make_pool(2, isa);
        test_every_format(pool, scalar);
        test_unaligned_weights(pool, scalar);
        test_nothing_outside_the_weights_is_read(pool);
        test_experts(pool, scalar);
        test_experts_in_part(pool);
        test_plain_linear(pool, scalar);
        test_norm_and_streams(pool, scalar);
        test_recurrences(pool, scalar);
        test_latent_attention(pool, scalar);
        test_sampler(isa);
        test_arguments_are_checked(pool);
        glm53_pool_destroy(pool);
        printf("kernels: instruction set %d ok\n", isa);
    }
    test_sampler_arguments_are_checked();
    glm53_pool_destroy(scalar);
    return 0;
}
