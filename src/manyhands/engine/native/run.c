/* Runs a plan's operations one after the other, each cut into tasks for a team: over columns, rows and heads, never over a sum. */
#include "compressed.h"
#include "index.h"
#include "mix.h"
#include "ngrams.h"
#include "states.h"

#include <string.h>

#ifdef SHARES_ALL /* tools/sanitized.py: all members of a team take part in the smallest job, so that races show */
enum { TASK_BYTES = 1, MEMBER_WORK = 1 };
#else
enum {
    TASK_BYTES = 1 << 16,   /* of weights that a task of a product reads at least */
    MEMBER_WORK = 1 << 18   /* multiply-adds for which waking one more thread pays */
};
#endif
enum {
    ATTEND_ROWS = 32,       /* positions of a task of attention */
    LEAST_HEADS = 4         /* query heads of one key head that a task keeps together */
};

typedef struct {
    const Plan *plan;
    const Op *op;
    const Segment *segments;
    int64_t num_segments, rows, per_task, num_parts, form, starts[MAX_REGISTERS];
    int64_t per_group; /* tasks: of a group of products, of a key head */
} Job;

static int64_t stride_of(const Plan *plan, int64_t number) { return ceil_div(plan->widths[number], SIDE) * SIDE; }

float *row_of(const Plan *plan, int64_t number, int64_t row)
{
    return plan->registers + plan->offsets[number] * plan->rows + row * stride_of(plan, number);
}

static int64_t position_of(const Job *job, int64_t row)
{
    const Segment *s = segment_of(job->segments, row);
    return s->start + row - s->row;
}

static int64_t position_back(const Job *job, int64_t row, int64_t back)
{
    int64_t position = position_of(job, row);
    return position > back ? position - back : 0;
}

/* Each of equal parts of a row times its number. n: source, by, target. */
static void multiply_row(const Plan *plan, const int64_t *n, int64_t row)
{
    int64_t parts = plan->widths[n[1]], width = plan->widths[n[2]] / parts;
    const float *source = row_of(plan, n[0], row), *by = row_of(plan, n[1], row);
    float *target = row_of(plan, n[2], row);
    for (int64_t part = 0; part < parts; part++)
        plan->kernels->multiply(source + part * width, by[part], target + part * width, width);
}

/* Times the factor of a position, or each head times its own. n: register, length, offset, growth, heads. */
static void scale_row(const Plan *plan, const Op *op, int64_t position, int64_t row)
{
    const int64_t *n = op->numbers, width = n[4] ? plan->widths[n[0]] / n[4] : plan->widths[n[0]];
    const float *scales = op->tensors[0].data, *biases = op->tensors[1].data;
    float *x = row_of(plan, n[0], row);
    if (!n[4])
        plan->kernels->multiply(x, position_scale(op->reals[0], n[1], position, n[3]), x, width);
    double log = n[4] ? position_log(n[1], position) : 0;
    for (int64_t h = 0; h < n[4]; h++)
        plan->kernels->multiply(x + h * width, (float)(scales[h] * log + biases[h]), x + h * width, width);
}

static void norm_row(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers;
    int64_t width = plan->widths[n[0]] / n[2];
    for (int64_t group = 0; group < n[2]; group++) {
        const float *vectors[2];
        for (int i = 0; i < 2; i++) {
            const float *data = op->tensors[i].data;
            vectors[i] = data && op->tensors[i].bytes > width * 4 ? data + group * width : data;
        }
        plan->kernels->norm(row_of(plan, n[0], row) + group * width, row_of(plan, n[1], row) + group * width, width, n[3],
                            (float)op->reals[0], vectors[0], vectors[1], (float)op->reals[1]);
    }
}

static float *angles_of(const Plan *plan, const Op *op, int64_t row) { return plan->angles + 2 * (row * plan->turns + op->cache); }

static void rotate_row(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers;
    const float *cos = angles_of(plan, op, row), *sin = cos + n[4];
    for (int64_t head = 0; head < n[1]; head++)
        plan->kernels->rotate(row_of(plan, n[0], row) + head * n[2] + n[3], n[4], n[5], cos, sin);
}

/* Columns [0, count), or those that are named. */
static void copy_columns(const float *from, const int32_t *columns, float *to, int64_t count)
{
    if (!columns)
        memcpy(to, from, (size_t)count * 4);
    for (int64_t i = 0; columns && i < count; i++)
        to[i] = from[columns[i]];
}

/* pairs [top_k, 2]: each weight times the number of its expert. */
static void scale_routes(const float *factors, float *pairs, int64_t top_k)
{
    for (int64_t i = 0; factors && i < top_k; i++)
        pairs[2 * i + 1] = pairs[2 * i + 1] * factors[(int64_t)pairs[2 * i]];
}

/* The experts of the row's id, if ids decide; else null. */
static const int32_t *chosen_by_id(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers;
    const int32_t *table = op->tensors[2].data;
    return table ? table + id_of(plan, n[8], row, op->tensors[2].bytes / (4 * n[3])) * n[3] : 0;
}

static void do_row(const Job *job, int64_t row)
{
    const Plan *plan = job->plan;
    const Kernels *kernels = plan->kernels;
    const Op *op = job->op;
    const int64_t *n = op->numbers;
    const double *reals = op->reals;
    switch (op->kind) {
    case NORM:
        norm_row(plan, op, row);
        break;
    case ROTARY:
        if (op->owns)
            rope_angles(op->tensors[0].data, n[4], reals[0], position_back(job, row, n[6]), angles_of(plan, op, row), angles_of(plan, op, row) + n[4]);
        rotate_row(plan, op, row);
        break;
    case GATE:
        kernels->gate(row_of(plan, n[0], row), row_of(plan, n[1], row), row_of(plan, n[2], row), plan->widths[n[2]], n[3],
                      (float)reals[0], (float)reals[1], (float)reals[2]);
        break;
    case ADD:
        kernels->add(row_of(plan, n[2], row), row_of(plan, n[0], row), (float)reals[0], row_of(plan, n[2], row), plan->widths[n[2]],
                     n[1] && plan->rounds);
        break;
    case MULTIPLY:
        if (op->tensors[0].data)
            kernels->gate(row_of(plan, n[0], row), op->tensors[0].data, row_of(plan, n[2], row), plan->widths[n[2]], 0, 1, 0, 0);
        else
            multiply_row(plan, n, row);
        break;
    case SCALE:
        scale_row(plan, op, position_of(job, row) + n[2], row);
        break;
    case POSITION:
        kernels->widen((const char *)op->tensors[0].data + (position_of(job, row) + n[2]) * plan->widths[n[0]] * size_of_type(n[1]), n[1], 1,
                       row_of(plan, n[0], row), plan->widths[n[0]], 0);
        break;
    case XIELU:
        kernels->xielu(row_of(plan, n[0], row), op->tensors[0].data, plan->widths[n[0]]);
        break;
    case ROUTE:
        kernels->route(&(Routing){n[2], n[3], n[4], n[5], n[6], n[7], n[10], (float)reals[0], (float)reals[1]}, row_of(plan, n[0], row),
                       op->tensors[0].data, chosen_by_id(plan, op, row), row_of(plan, n[1], row));
        scale_routes(op->tensors[1].data, row_of(plan, n[1], row), n[3]);
        break;
    case COLLAPSE:
        collapse_row(plan, op, row);
        break;
    case SPREAD:
        spread_row(plan, op, row);
        break;
    case COPY:
        for (int64_t i = 0; i < n[5]; i++)
            copy_columns(row_of(plan, n[0], row) + n[2] + i * n[6], op->tensors[0].data, row_of(plan, n[1], row) + n[3] + i * n[7], n[4]);
        for (int64_t i = 0; n[8] && i < n[5]; i++)
            kernels->widen(row_of(plan, n[1], row) + n[3] + i * n[7], F32, 1, row_of(plan, n[1], row) + n[3] + i * n[7], n[4], plan->rounds);
        break;
    case DECAY:
        if (n[2])
            kernels->decay(row_of(plan, n[0], row), op->tensors[0].data, op->tensors[1].data, n[2] == 2 ? (float)reals[0] : 0, row_of(plan, n[1], row), plan->widths[n[0]]);
        else
            decay_row(row_of(plan, n[0], row), op->tensors[0].data, op->tensors[1].data, plan->widths[n[0]], row_of(plan, n[1], row));
        break;
    case MIX: case RESCALE: case SPARSIFY:
        mix_row(plan, op, row);
        break;
    case NGRAMS:
        ngrams_row(plan, op, position_of(job, row), row);
        break;
    case ATTEND_STREAMS:
        attend_streams_row(plan, op, row);
        break;
    case ADMIT:
        admit_row(plan, op, row);
        break;
    case SOFTEN:
        kernels->soften(row_of(plan, n[0], row), plan->widths[n[0]], (float)reals[0], (float)reals[1]);
        break;
    }
}

static void row_task(const void *argument, int64_t task, void *scratch)
{
    const Job *job = argument;
    (void)scratch;
    for (int64_t row = task * job->per_task; row < job->rows && row < (task + 1) * job->per_task; row++)
        do_row(job, row);
}

/* Rows that are prepared, and where those of a group lie. */
static int64_t whole_rows(const Job *job)
{
    int64_t block = job->form == TILED || job->form == TILED_GROUPS ? SIDE : 1;
    return ceil_div(job->rows, block) * block;
}

static Source prepared_of(const Job *job, int64_t group)
{
    int64_t depth = ceil_div(job->op->numbers[5], DEPTH);
    int64_t floats = whole_rows(job) * depth * (job->form == TILED_GROUPS ? GROUP_FLOATS : DEPTH);
    if (job->form == TILED)
        floats = ceil_div(job->rows, 2 * SIDE) * SIDE * depth * DEPTH;
    if (job->form == GROUPED)
        return grouped_rows(job->plan->prepared + group * floats, job->rows, depth);
    Source source = few_rows(job->plan->prepared + group * floats, job->rows, depth);
    source.form = job->form;
    return source;
}

static void prepare_task(const void *argument, int64_t task, void *scratch)
{
    const Job *job = argument;
    const Plan *plan = job->plan;
    const int64_t *n = job->op->numbers;
    int64_t first = task % job->per_group * job->per_task, group = task / job->per_group, whole = whole_rows(job);
    Source source = prepared_of(job, group);
    (void)scratch;
    if (first < whole)
        plan->kernels->prepare(row_of(plan, n[0], 0) + n[4] + group * n[9], stride_of(plan, n[0]), n[5], plan->rounds, &source, first,
                               at_most(whole - first, job->per_task));
}

/* Parts (operations that read one source) one after the other, each in tasks of per_task panels; starts: their first tasks. */
static void product_task(const void *argument, int64_t task, void *scratch)
{
    const Job *job = argument;
    const Plan *plan = job->plan;
    int64_t part = 0;
    while (part + 1 < job->num_parts && task >= job->starts[part + 1])
        part++;
    const Op *op = job->op + part;
    const int64_t *n = op->numbers;
    int64_t group = n[8] > 1 ? task / job->per_group : 0, bytes = n[11] ? 0 : op->tensors[0].bytes / n[8];
    const float *bias = op->tensors[1].data;
    Matrix matrix = {.type = n[2], .n = n[7], .k = n[5], .activation = n[3], .packed = (const char *)op->tensors[0].data + group * bytes,
                     .bias = bias ? bias + group * n[7] : 0};
    Source source = prepared_of(job, group);
    task = n[8] > 1 ? task % job->per_group : task - job->starts[part];
    int64_t panel = task * job->per_task, end = at_most(panel + job->per_task, ceil_div(matrix.n, SIDE));
    plan->kernels->product(&matrix, &source, panel, end, row_of(plan, n[1], 0) + n[6] + group * n[10], stride_of(plan, n[1]), scratch);
}

static void remember_task(const void *argument, int64_t task, void *scratch)
{
    const Job *job = argument;
    const Plan *plan = job->plan;
    const int64_t *n = job->op->numbers;
    Kind kind = plan_kind(plan, job->op);
    const Segment *s = segment_of(job->segments, task);
    (void)scratch;
    for (int64_t head = 0; head < n[5]; head++) {
        int64_t position = s->start + task - s->row;
        plan->kernels->remember(&kind, row_of(plan, n[1], task) + head * kind.width, row_of(plan, n[2], task) + head * kind.value_width,
                                s->blocks[position / BLOCK] + job->op->cache + head * block_bytes(&kind), position % BLOCK);
    }
}

/* A task: ATTEND_ROWS positions of a segment, per_task query heads of one key head. */
static void attend_task(const void *argument, int64_t task, void *scratch)
{
    const Job *job = argument;
    const Plan *plan = job->plan;
    const int64_t *n = job->op->numbers;
    Kind kind = plan_kind(plan, job->op);
    int64_t part = task % job->per_group, head = task / job->per_group % n[5], piece = task / job->per_group / n[5];
    const Segment *s = job->segments;
    for (; piece >= ceil_div(s->count, ATTEND_ROWS); s++)
        piece -= ceil_div(s->count, ATTEND_ROWS);
    int64_t first = piece * ATTEND_ROWS, row = s->row + first, query = head * kind.groups + part * job->per_task;
    Keys keys = {s->blocks, job->op->cache + head * block_bytes(&kind)};
    const float *sinks = job->op->tensors[0].data;
    kind.groups = at_most(kind.groups - part * job->per_task, job->per_task);
    if (job->op->tensors[1].data)
        kind.slopes = (const float *)job->op->tensors[1].data + query;
    if (n[12])
        kind.biases = row_of(plan, n[12], row) + query * kind.extent, kind.bias_stride = stride_of(plan, n[12]);
    plan->kernels->attend(&kind, row_of(plan, n[0], row) + query * kind.width, stride_of(plan, n[0]), &keys, s->start + first,
                          at_most(s->count - first, ATTEND_ROWS), sinks ? sinks + query : 0,
                          row_of(plan, n[3], row) + query * kind.value_width, stride_of(plan, n[3]), scratch);
}

int64_t members_for(int64_t threads, int64_t work)
{
    int64_t pays = work / MEMBER_WORK;
    return pays < 1 ? 1 : at_most(pays, threads);
}

static int run_rows(Team *team, int64_t threads, Job job, Task task, int64_t width)
{
    int64_t members = members_for(threads, job.rows * width * 8), tasks = at_most(job.rows, members * 4);
    job.per_task = ceil_div(job.rows, tasks);
    return team_run(team, members, task, &job, ceil_div(job.rows, job.per_task), 0);
}

static int is_prepared_alike(int64_t a, int64_t b) { return a == b || (is_small(a) && is_small(b) && fits_tiles(a) == fits_tiles(b)); }

/* Whether what two products write lies apart; registers that are not needed at once may share columns. */
static int are_apart(const Plan *plan, const int64_t *a, const int64_t *b)
{
    int64_t first = plan->offsets[a[1]], second = plan->offsets[b[1]];
    if (a[1] == b[1])
        return a[6] + a[7] <= b[6] || b[6] + b[7] <= a[6];
    return first + stride_of(plan, a[1]) <= second || second + stride_of(plan, b[1]) <= first;
}

/* Whether a product goes together with those from `first` on: it reads the same columns, and writes where none of them does. The last may
 * overwrite what all read. */
static int goes_with(const Plan *plan, const Op *first, const Op *op)
{
    const int64_t *n = op->numbers, *of = first->numbers;
    if (op->kind != PRODUCT || n[8] != 1 || n[0] != of[0] || n[4] != of[4] || n[5] != of[5] || !is_prepared_alike(n[2], of[2]))
        return 0;
    for (const Op *before = first; before < op; before++)
        if (before->numbers[1] == of[0] || !are_apart(plan, before->numbers, n))
            return 0;
    return 1;
}

/* Products from `op` on that are computed together: how many. */
static int64_t count_parts(const Plan *plan, const Op *op)
{
    int64_t count = 1, left = at_most(plan->ops + plan->num_ops - op, MAX_REGISTERS);
    while (op->numbers[8] == 1 && count < left && goes_with(plan, op, op + count))
        count++;
    return count;
}

static int64_t form_of(const Plan *plan, int64_t type, int64_t rows)
{
    int64_t has_tiles = plan->kernels->has_tiles;
    if (is_small(type))
        return has_tiles && fits_tiles(type) && rows > FEW_TILED_GROUPS ? TILED_GROUPS : GROUPED;
    return has_tiles && plan->rounds && type == BF16 && rows > FEW_TILED ? TILED : AS_THEY_ARE;
}

static int run_products(const Plan *plan, Team *team, int64_t threads, Job job)
{
    const Op *op = job.op;
    int64_t k = op->numbers[5], groups = op->numbers[8], panels = 0, tasks = 0;
    for (int64_t part = 0; part < job.num_parts; part++)
        panels += ceil_div(op[part].numbers[7], SIDE);
    job.form = form_of(plan, op->numbers[2], job.rows);
    int64_t members = members_for(threads, panels * SIDE * k * job.rows * groups);
    job.per_task = ceil_div(ceil_div(job.rows, members * 2), 48) * 48; /* a multiple of all blocks */
    job.per_group = ceil_div(job.rows, job.per_task);
    int failed = team_run(team, members_for(threads, job.rows * k * 4 * groups), prepare_task, &job, job.per_group * groups, 0);
    int64_t least = ceil_div(TASK_BYTES, panel_bytes(op->numbers[2], ceil_div(k, DEPTH)));
    job.per_task = ceil_div(panels * groups, members * 8);
    int64_t together = job.form == TILED ? at_most(TILED_PANELS, ceil_div(panels * groups, members * 2)) : 0; /* rows are read once for them */
    least = least < together ? together : least;
    job.per_task = members == 1 ? panels : job.per_task < least ? least : job.per_task;
    job.per_group = ceil_div(panels, job.per_task);
    for (int64_t part = 0; part < job.num_parts; part++) {
        job.starts[part] = tasks;
        tasks += ceil_div(ceil_div(op[part].numbers[7], SIDE), job.per_task) * groups;
    }
    return failed ? failed : team_run(team, members, product_task, &job, tasks, SCRATCH_BYTES);
}

/* Rows that see all their positions. */
static int attend_all(Team *team, int64_t threads, Job job)
{
    const int64_t *n = job.op->numbers;
    int64_t pieces = 0, keys = 0, groups = n[4] / n[5];
    Kind kind = plan_kind(job.plan, job.op);
    for (int64_t i = 0; i < job.num_segments; i++) {
        pieces += ceil_div(job.segments[i].count, ATTEND_ROWS);
        keys += job.segments[i].count * (job.segments[i].start + job.segments[i].count);
    }
    if (!pieces)
        return 0;
    int64_t members = members_for(threads, keys * n[4] * (n[6] + n[7])), parts = ceil_div(2 * members, pieces * n[5]);
    job.per_task = members == 1 ? groups : ceil_div(groups, at_most(parts, ceil_div(groups, LEAST_HEADS)));
    job.per_group = ceil_div(groups, job.per_task);
    return team_run(team, members, attend_task, &job, pieces * n[5] * job.per_group, attend_scratch(&kind));
}

static int run_attention(Plan *plan, Team *team, int64_t threads, Job job)
{
    const int64_t *n = job.op->numbers;
    Segment some[CHUNK];
    int failed = team_run(team, members_for(threads, job.rows * n[5] * (n[6] + n[7]) * 16), remember_task, &job, job.rows, 0);
    if (n[11] && !failed) {
        failed = attend_chosen(plan, team, threads, job.op, job.segments, job.num_segments);
        job.num_segments = seeing_all(job.op, job.segments, job.num_segments, attention_most(plan, job.op), some), job.segments = some;
    }
    return failed ? failed : attend_all(team, threads, job);
}

int plan_run_chunk(Plan *plan, Team *team, int64_t threads, const Segment *segments, int64_t num_segments, int64_t rows)
{
    for (int64_t i = 0; i < plan->num_ops;) {
        Job job = {.plan = plan, .op = plan->ops + i, .segments = segments, .num_segments = num_segments, .rows = rows};
        int failed;
        job.num_parts = job.op->kind == PRODUCT ? count_parts(plan, job.op) : 1;
        i += job.num_parts;
        if (job.op->kind == PRODUCT)
            failed = run_products(plan, team, threads, job);
        else if (job.op->kind == EXPERTS)
            failed = experts_run(plan, team, threads, job.op, rows);
        else if (job.op->kind == ATTENTION)
            failed = run_attention(plan, team, threads, job);
        else if (job.op->kind == INDEX)
            failed = index_run(plan, team, threads, job.op, segments, num_segments, rows);
        else if (job.op->kind == COMPRESS)
            failed = compress_run(plan, team, threads, job.op, segments, num_segments, rows);
        else if (job.op->kind == ATTEND_ENTRIES)
            failed = entries_run(plan, team, threads, job.op, segments, num_segments, rows);
        else if (job.op->kind == CONVOLVE || job.op->kind == DELTA)
            failed = states_run(plan, team, threads, job.op, segments, num_segments, rows);
        else
            failed = run_rows(team, threads, job, row_task, plan->widths[job.op->numbers[job.op->kind == NGRAMS]]); /* its rows are looked up */
        if (failed)
            return failed;
    }
    return 0;
}
