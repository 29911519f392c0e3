/* The gated expert FFN over the picks of several rows: what is asked for, and how it is laid out in memory.
 *
 * The picks of a wave of rows are sorted by expert: a visit is one (row, expert) pair, a group the visits of
 * one expert. Groups of many rows are computed in phases (experts_wide.c), those of few as tasks that wait
 * for one another (experts_few.c); the order of every sum is the same.
 */
#include "experts.h"

/* Scratch that one wave may take, in bytes; more rows are done in several waves. */
#define WAVE_BYTES ((size_t)256 << 20)

/* Visits of a wave of more than GLM53_FEW_ROWS rows that may be computed as tasks, each of which keeps
 * partial sums of its own: 0.43 MB of scratch a visit at 4096 x 2048, its input included, 111 MB in all. */
enum { FEW_VISITS = 256 };

void glm53_wave_prepare(const glm53_tier *tier, const glm53_wave *w, int32_t visit, bool is_up, int32_t begin,
                        int32_t end) {
    const glm53_group *g = &w->groups[w->visit_group[visit]];
    const float *x = w->spec->x + (size_t)w->visit_row[visit] * (size_t)w->hidden;
    glm53_product_prepare(tier, is_up ? &g->up : &g->gate, visit - g->first_visit, x, begin, end);
}

void glm53_wave_activate(const glm53_tier *tier, const glm53_wave *w, int32_t visit, int32_t block) {
    const glm53_group *g = &w->groups[w->visit_group[visit]];
    int32_t r = visit - g->first_visit;
    float gate[GLM53_BLOCK], up[GLM53_BLOCK];
    glm53_product_finish(tier, &g->gate, r, block, gate);
    glm53_product_finish(tier, &g->up, r, block, up);
    tier->activate(gate, up, w->spec->limit, w->spec->clamp, gate);
    float *x = g->down.x + ((size_t)block * (size_t)g->down.rows + (size_t)r) * GLM53_X_FLOATS;
    tier->prepare(gate, g->down.matrix->suh + (size_t)block * GLM53_BLOCK, g->down.precision, x);
}

void glm53_wave_combine(const glm53_tier *tier, const glm53_wave *w, int32_t r, int32_t block) {
    const glm53_expert_job *spec = w->spec;
    size_t row = (size_t)(w->row_begin + r), num_picks = (size_t)spec->num_picks;
    float *y = spec->y + row * (size_t)w->hidden + (size_t)block * GLM53_BLOCK;
    memset(y, 0, GLM53_BLOCK * sizeof *y);
    for (size_t i = 0; i < num_picks; i++) {
        int32_t visit = w->pick_visit[(size_t)r * num_picks + i];
        if (visit < 0) continue;
        const glm53_group *g = &w->groups[w->visit_group[visit]];
        float part[GLM53_BLOCK];
        glm53_product_finish(tier, &g->down, visit - g->first_visit, block, part);
        tier->add_scaled(y, part, spec->weights[row * num_picks + i], GLM53_BLOCK);
    }
}

static void take_index(glm53_arena *a, glm53_wave *w) {
    size_t num_picks = (size_t)(w->row_end - w->row_begin) * (size_t)w->spec->num_picks;
    size_t num_experts = (size_t)w->spec->num_experts;
    w->counts = glm53_arena_take(a, num_experts, sizeof *w->counts);
    w->pick_visit = glm53_arena_take(a, num_picks, sizeof *w->pick_visit);
    w->visit_row = glm53_arena_take(a, num_picks, sizeof *w->visit_row);
    w->visit_group = glm53_arena_take(a, num_picks, sizeof *w->visit_group);
    w->groups = glm53_arena_take(a, num_experts < num_picks ? num_experts : num_picks, sizeof *w->groups);
}

/* Sort the wave's picks into groups, experts ascending, rows ascending within a group. */
static void build_groups(glm53_wave *w) {
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
        glm53_group *g = &w->groups[w->num_groups];
        g->first_visit = w->num_visits;
        g->gate.matrix = &spec->table[e].gate;
        g->gate.rows = 0; /* counts up below */
        w->num_visits += w->counts[e];
        w->counts[e] = w->num_groups++;
    }
    for (int32_t i = 0; i < num_picks; i++) {
        w->pick_visit[i] = -1;
        if (picks[i] < 0) continue;
        glm53_group *g = &w->groups[w->counts[picks[i]]];
        int32_t visit = g->first_visit + g->gate.rows++;
        w->pick_visit[i] = visit;
        w->visit_row[visit] = w->row_begin + i / spec->num_picks;
        w->visit_group[visit] = w->counts[picks[i]];
    }
}

static void place_product(glm53_arena *a, glm53_product *product) {
    product->x =
        glm53_arena_take(a, (size_t)product->rows * (size_t)product->matrix->in_features, sizeof(float));
    product->parts = glm53_arena_take(a, glm53_product_part_floats(product), sizeof(float));
}

static bool is_part(const glm53_expert_job *spec, const glm53_expert *expert) {
    return spec->part_end > 0 && expert == &spec->table[spec->part_expert];
}

/* Lay out every group's buffers. */
static void build_products(const glm53_pool *pool, glm53_arena *a, glm53_wave *w, bool is_wide) {
    int32_t precision = w->spec->precision;
    for (int32_t i = 0; i < w->num_groups; i++) {
        glm53_group *g = &w->groups[i];
        const glm53_expert *expert =
            (const glm53_expert *)(const void *)g->gate.matrix; /* its first member */
        int32_t rows = g->gate.rows;
        g->gate = glm53_product_of(pool, &expert->gate, rows, precision, is_wide);
        g->up = glm53_product_of(pool, &expert->up, rows, precision, is_wide);
        g->down = glm53_product_of(pool, &expert->down, rows, precision, is_wide);
        g->block_begin = 0;
        g->block_end = w->intermediate / GLM53_BLOCK;
        if (is_part(w->spec, expert)) {
            g->block_begin = w->spec->part_begin;
            g->block_end = w->spec->part_end;
            glm53_product_narrow(&g->down, g->block_begin, g->block_end);
        }
        place_product(a, &g->gate);
        place_product(a, &g->up);
        place_product(a, &g->down);
    }
}

typedef struct {
    glm53_wide wide;
    glm53_few few;
} plans;

static plans build(const glm53_pool *pool, glm53_arena *a, glm53_wave *w, bool is_wide) {
    plans p = {0};
    build_products(pool, a, w, is_wide);
    if (is_wide) {
        p.wide = glm53_wide_plan(pool, a, w);
    } else {
        p.few = glm53_few_plan(a, w);
    }
    return p;
}

/* As tasks, if no expert has many rows: then phases would wait for one another and gain nothing. A short
 * prompt spread over many experts is such a wave. */
static bool is_wide_wave(const glm53_wave *w) {
    if (w->row_end - w->row_begin <= GLM53_FEW_ROWS) return false;
    if (w->num_visits > FEW_VISITS) return true;
    for (int32_t i = 0; i < w->num_groups; i++) {
        if (w->groups[i].gate.rows > GLM53_FEW_ROWS) return true;
    }
    return false;
}

/* The index comes first in the scratch and must be filled before the size of the rest is known. Growing the
 * scratch loses its contents, so the index is then built again; once it has grown, nothing is allocated. */
static int32_t run_wave(glm53_pool *pool, glm53_wave *w) {
    glm53_arena index = {0};
    take_index(&index, w);
    char *scratch = glm53_pool_scratch(pool, index.used);
    if (!scratch) return GLM53_NO_MEMORY;
    index = (glm53_arena){.base = scratch};
    take_index(&index, w);
    build_groups(w);
    bool is_wide = is_wide_wave(w);
    glm53_arena sizes = {.used = index.used};
    build(pool, &sizes, w, is_wide);
    char *grown = glm53_pool_scratch(pool, sizes.used);
    if (!grown) return GLM53_NO_MEMORY;
    if (grown != scratch) {
        index = (glm53_arena){.base = grown};
        take_index(&index, w);
        build_groups(w);
    }
    plans p = build(pool, &index, w, is_wide);
    if (is_wide) {
        glm53_wide_run(pool, &p.wide);
    } else {
        glm53_few_run(pool, &p.few);
    }
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

static int32_t check_part(const glm53_expert_job *job) {
    if (job->part_end == 0) return GLM53_OK;
    if (job->part_expert < 0 || job->part_expert >= job->num_experts) return GLM53_BAD_PICK;
    const glm53_expert *expert = &job->table[job->part_expert];
    if (job->part_begin < 0 || job->part_begin >= job->part_end) return GLM53_BAD_ARGUMENT;
    if (job->part_end > expert->gate.out_features / GLM53_BLOCK) return GLM53_BAD_ARGUMENT;
    return job->rows > GLM53_FEW_ROWS ? GLM53_BAD_ARGUMENT : GLM53_OK; /* wide products are not narrowed */
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
    int32_t status = check_expert(&job->table[0], first->in_features, first->out_features);
    return status == GLM53_OK ? check_part(job) : status;
}

int32_t glm53_experts(glm53_pool *pool, const glm53_expert_job *job) {
    if (!pool) return GLM53_BAD_ARGUMENT;
    int32_t status = check_job(job);
    if (status != GLM53_OK) return status;
    if (!glm53_pool_acquire(pool)) return GLM53_BUSY;
    glm53_wave w = {.spec = job};
    w.hidden = job->table[0].gate.in_features;
    w.intermediate = job->table[0].gate.out_features;
    int32_t step = rows_per_wave(job, w.hidden, w.intermediate);
    for (int32_t row = 0; row < job->rows && status == GLM53_OK; row += w.row_end - w.row_begin) {
        w.row_begin = row;
        w.row_end = job->rows - row < step ? job->rows : row + step;
        status = run_wave(pool, &w);
    }
    glm53_pool_release(pool);
    return status;
}
