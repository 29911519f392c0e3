/* The gated expert FFN over the picks of several rows.
 *
 * The picks of a wave of rows are sorted by expert: a visit is one (row, expert) pair, a group the visits of
 * one expert. Five phases with a barrier between them, each a list of tasks:
 *
 *   prepare   visit x {gate, up}        input transform of the row
 *   multiply  group x {gate, up} x cut  packed weights times rows
 *   activate  visit x block             output transform, silu, clamp, product, input transform of down
 *   multiply  group x cut               down
 *   combine   row x block               output transform, weighted sum in the order of the row's picks
 */
#include "product.h"

/* Scratch that one wave may take, in bytes; more rows are done in several waves. */
#define WAVE_BYTES ((size_t)256 << 20)

typedef struct {
    glm53_product gate, up, down;
    int32_t first_visit;
    int64_t first_multiply, first_down; /* numbers of the group's first tasks */
} group;

typedef struct {
    const glm53_expert_job *spec;
    int32_t hidden, intermediate;
    int32_t row_begin, row_end;
    int32_t num_visits, num_groups;
    int32_t *counts;      /* (num_experts): visits, then the expert's group */
    int32_t *pick_visit;  /* (rows of the wave, num_picks): visit or -1 */
    int32_t *visit_row;   /* (num_visits) */
    int32_t *visit_group; /* (num_visits) */
    group *groups;
    float *temps;
    size_t temp_floats; /* per thread */
    int64_t multiply_tasks, down_tasks;
} wave;

static void prepare_phase(glm53_pool *pool, const wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    for (int64_t task; (task = glm53_pool_next(pool)) < 2 * (int64_t)w->num_visits;) {
        int32_t visit = (int32_t)(task / 2);
        const group *g = &w->groups[w->visit_group[visit]];
        const float *x = w->spec->x + (size_t)w->visit_row[visit] * (size_t)w->hidden;
        glm53_product_prepare(tier, task % 2 ? &g->up : &g->gate, visit - g->first_visit, x);
    }
}

static void multiply_phase(glm53_pool *pool, const wave *w, float *temp) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    int32_t i = 0; /* a thread's task numbers only rise, so its group does, too */
    for (int64_t task; (task = glm53_pool_next(pool)) < w->multiply_tasks;) {
        while (i + 1 < w->num_groups && w->groups[i + 1].first_multiply <= task) i++;
        const group *g = &w->groups[i];
        int64_t local = task - g->first_multiply, gate_tasks = glm53_product_tasks(&g->gate);
        if (local < gate_tasks) {
            glm53_product_task(tier, &g->gate, local, temp);
        } else {
            glm53_product_task(tier, &g->up, local - gate_tasks, temp);
        }
    }
}

static void activate_phase(glm53_pool *pool, const wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    int32_t blocks = w->intermediate / GLM53_BLOCK;
    for (int64_t task; (task = glm53_pool_next(pool)) < (int64_t)w->num_visits * blocks;) {
        int32_t visit = (int32_t)(task / blocks), block = (int32_t)(task % blocks);
        const group *g = &w->groups[w->visit_group[visit]];
        int32_t r = visit - g->first_visit;
        float gate[GLM53_BLOCK], up[GLM53_BLOCK];
        glm53_product_finish(tier, &g->gate, r, block, gate);
        glm53_product_finish(tier, &g->up, r, block, up);
        tier->activate(gate, up, w->spec->limit, w->spec->clamp, gate);
        float *x = g->down.x + ((size_t)block * (size_t)g->down.rows + (size_t)r) * GLM53_X_FLOATS;
        tier->prepare(gate, g->down.matrix->suh + (size_t)block * GLM53_BLOCK, g->down.precision, x);
    }
}

static void down_phase(glm53_pool *pool, const wave *w, float *temp) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    int32_t i = 0;
    for (int64_t task; (task = glm53_pool_next(pool)) < w->down_tasks;) {
        while (i + 1 < w->num_groups && w->groups[i + 1].first_down <= task) i++;
        glm53_product_task(tier, &w->groups[i].down, task - w->groups[i].first_down, temp);
    }
}

static void combine_phase(glm53_pool *pool, const wave *w) {
    const glm53_tier *tier = glm53_pool_tier(pool);
    const glm53_expert_job *spec = w->spec;
    int32_t blocks = w->hidden / GLM53_BLOCK;
    int64_t num_tasks = (int64_t)(w->row_end - w->row_begin) * blocks;
    for (int64_t task; (task = glm53_pool_next(pool)) < num_tasks;) {
        size_t r = (size_t)(task / blocks), block = (size_t)(task % blocks), row = (size_t)w->row_begin + r;
        float *y = spec->y + row * (size_t)w->hidden + block * GLM53_BLOCK;
        memset(y, 0, GLM53_BLOCK * sizeof *y);
        for (int32_t i = 0; i < spec->num_picks; i++) {
            int32_t visit = w->pick_visit[r * (size_t)spec->num_picks + (size_t)i];
            if (visit < 0) continue;
            const group *g = &w->groups[w->visit_group[visit]];
            float part[GLM53_BLOCK];
            glm53_product_finish(tier, &g->down, visit - g->first_visit, (int32_t)block, part);
            tier->add_scaled(y, part, spec->weights[row * (size_t)spec->num_picks + (size_t)i], GLM53_BLOCK);
        }
    }
}

static void wave_main(glm53_pool *pool, void *context, int32_t thread) {
    const wave *w = context;
    float *temp = w->temps + (size_t)thread * w->temp_floats;
    prepare_phase(pool, w);
    glm53_pool_barrier(pool);
    multiply_phase(pool, w, temp);
    glm53_pool_barrier(pool);
    activate_phase(pool, w);
    glm53_pool_barrier(pool);
    down_phase(pool, w, temp);
    glm53_pool_barrier(pool);
    combine_phase(pool, w);
}

/* Hands out pieces of one allocation; with base NULL it only counts. */
typedef struct {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t count, size_t size) {
    size_t offset = a->used;
    a->used += (count * size + 63) / 64 * 64;
    return a->base ? a->base + offset : NULL;
}

static void take_index(arena *a, wave *w) {
    size_t num_picks = (size_t)(w->row_end - w->row_begin) * (size_t)w->spec->num_picks;
    size_t num_experts = (size_t)w->spec->num_experts;
    w->counts = take(a, num_experts, sizeof *w->counts);
    w->pick_visit = take(a, num_picks, sizeof *w->pick_visit);
    w->visit_row = take(a, num_picks, sizeof *w->visit_row);
    w->visit_group = take(a, num_picks, sizeof *w->visit_group);
    w->groups = take(a, num_experts < num_picks ? num_experts : num_picks, sizeof *w->groups);
}

/* Sort the wave's picks into groups, experts ascending, rows ascending within a group. */
static void build_groups(wave *w) {
    const glm53_expert_job *spec = w->spec;
    const int32_t *picks = spec->picks + (size_t)w->row_begin * (size_t)spec->num_picks;
    int32_t num_picks = (w->row_end - w->row_begin) * spec->num_picks;
    memset(w->counts, 0, (size_t)spec->num_experts * sizeof *w->counts);
    for (int32_t i = 0; i < num_picks; i++) {
        if (picks[i] >= 0) w->counts[picks[i]]++;
    }
    w->num_visits = w->num_groups = 0;
    for (int32_t e = 0; e < spec->num_experts; e++) {
        if (w->counts[e] == 0) continue;
        group *g = &w->groups[w->num_groups];
        g->first_visit = w->num_visits;
        g->gate.matrix = &spec->table[e].gate;
        g->gate.rows = 0; /* counts up below */
        w->num_visits += w->counts[e];
        w->counts[e] = w->num_groups++;
    }
    for (int32_t i = 0; i < num_picks; i++) {
        w->pick_visit[i] = -1;
        if (picks[i] < 0) continue;
        group *g = &w->groups[w->counts[picks[i]]];
        int32_t visit = g->first_visit + g->gate.rows++;
        w->pick_visit[i] = visit;
        w->visit_row[visit] = w->row_begin + i / spec->num_picks;
        w->visit_group[visit] = w->counts[picks[i]];
    }
}

static void place_product(arena *a, glm53_product *product) {
    product->x = take(a, (size_t)product->rows * (size_t)product->matrix->in_features, sizeof(float));
    product->parts = take(a, glm53_product_part_floats(product), sizeof(float));
}

/* Lay out every group's buffers and number its tasks. */
static void build_products(const glm53_pool *pool, arena *a, wave *w, bool is_wide) {
    const glm53_expert_job *spec = w->spec;
    int32_t most_rows = 0;
    w->multiply_tasks = w->down_tasks = 0;
    for (int32_t i = 0; i < w->num_groups; i++) {
        group *g = &w->groups[i];
        const glm53_expert *expert =
            (const glm53_expert *)(const void *)g->gate.matrix; /* its first member */
        int32_t rows = g->gate.rows;
        g->gate = glm53_product_of(pool, &expert->gate, rows, spec->precision, is_wide);
        g->up = glm53_product_of(pool, &expert->up, rows, spec->precision, is_wide);
        g->down = glm53_product_of(pool, &expert->down, rows, spec->precision, is_wide);
        place_product(a, &g->gate);
        place_product(a, &g->up);
        place_product(a, &g->down);
        g->first_multiply = w->multiply_tasks;
        g->first_down = w->down_tasks;
        w->multiply_tasks += glm53_product_tasks(&g->gate) + glm53_product_tasks(&g->up);
        w->down_tasks += glm53_product_tasks(&g->down);
        if (rows > most_rows) most_rows = rows;
    }
    w->temp_floats = is_wide ? (size_t)most_rows * GLM53_BLOCK : 0;
    w->temps = take(a, w->temp_floats * (size_t)glm53_pool_threads(pool), sizeof(float));
}

/* The index comes first in the scratch and must be filled before the size of the rest is known. Growing the
 * scratch loses its contents, so the index is then built again; once it has grown, nothing is allocated. */
static int32_t run_wave(glm53_pool *pool, wave *w, bool is_wide) {
    arena index = {0};
    take_index(&index, w);
    char *scratch = glm53_pool_scratch(pool, index.used);
    if (!scratch) return GLM53_NO_MEMORY;
    index = (arena){.base = scratch};
    take_index(&index, w);
    build_groups(w);
    arena sizes = {.used = index.used};
    build_products(pool, &sizes, w, is_wide);
    char *grown = glm53_pool_scratch(pool, sizes.used);
    if (!grown) return GLM53_NO_MEMORY;
    if (grown != scratch) {
        index = (arena){.base = grown};
        take_index(&index, w);
        build_groups(w);
    }
    build_products(pool, &index, w, is_wide);
    glm53_pool_run(pool, wave_main, w, (int64_t)w->num_visits * 3 * w->hidden * w->intermediate);
    return GLM53_OK;
}

static int32_t rows_per_wave(const glm53_expert_job *spec, int32_t hidden, int32_t intermediate) {
    size_t row_bytes = (size_t)spec->num_picks * 3 * ((size_t)hidden + (size_t)intermediate) * sizeof(float);
    size_t rows = WAVE_BYTES / row_bytes;
    return rows < GLM53_FEW_ROWS ? GLM53_FEW_ROWS : rows > INT32_MAX ? INT32_MAX : (int32_t)rows;
}

static int32_t check_expert(const glm53_expert *expert, int32_t hidden, int32_t intermediate) {
    const glm53_matrix *matrices[3] = {&expert->gate, &expert->up, &expert->down};
    for (int32_t i = 0; i < 3; i++) {
        int32_t status = glm53_matrix_check(matrices[i]);
        if (status != GLM53_OK) return status;
        int32_t in = i < 2 ? hidden : intermediate, out = i < 2 ? intermediate : hidden;
        if (matrices[i]->in_features != in || matrices[i]->out_features != out) return GLM53_BAD_SHAPE;
    }
    return GLM53_OK;
}

static int32_t check_job(const glm53_expert_job *job) {
    if (!job || !job->table || !job->x || !job->picks || !job->weights || !job->y) return GLM53_BAD_ARGUMENT;
    if (job->num_experts < 1 || job->rows < 1 || job->num_picks < 1) return GLM53_BAD_ARGUMENT;
    if ((int64_t)job->rows * job->num_picks > INT32_MAX / 2) return GLM53_BAD_ARGUMENT;
    if (job->precision != GLM53_EXACT32 && job->precision != GLM53_FAST16) return GLM53_BAD_ARGUMENT;
    if (job->clamp != GLM53_CLAMP_GATE && job->clamp != GLM53_CLAMP_ACTIVATION) return GLM53_BAD_ARGUMENT;
    if (!(job->limit >= 0.0f)) return GLM53_BAD_ARGUMENT;
    const glm53_matrix *first = &job->table[0].gate;
    int32_t num_picks = job->rows * job->num_picks;
    for (int32_t i = 0; i < num_picks; i++) {
        if (job->picks[i] == -1) continue;
        if (job->picks[i] < 0 || job->picks[i] >= job->num_experts) return GLM53_BAD_PICK;
        int32_t status = check_expert(&job->table[job->picks[i]], first->in_features, first->out_features);
        if (status != GLM53_OK) return status;
    }
    return check_expert(&job->table[0], first->in_features, first->out_features);
}

int32_t glm53_experts(glm53_pool *pool, const glm53_expert_job *job) {
    if (!pool) return GLM53_BAD_ARGUMENT;
    int32_t status = check_job(job);
    if (status != GLM53_OK) return status;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    wave w = {.spec = job};
    w.hidden = job->table[0].gate.in_features;
    w.intermediate = job->table[0].gate.out_features;
    bool is_wide = job->rows > GLM53_FEW_ROWS;
    int32_t step = rows_per_wave(job, w.hidden, w.intermediate);
    for (int32_t row = 0; row < job->rows && status == GLM53_OK; row += w.row_end - w.row_begin) {
        w.row_begin = row;
        w.row_end = job->rows - row < step ? job->rows : row + step;
        status = run_wave(pool, &w, is_wide);
    }
    glm53_pool_release(pool);
    return status;
}
