/* Positions in entries. COMPRESS keeps what the last positions give, and makes an entry in the row of its last position; ATTEND_ENTRIES
 * caches keys and entries, as rows, and attends, row by row, to the last positions and to entries, which are put into blocks as a cache of
 * keys has them. */
#include "compressed.h"
#include "index.h"

#include <string.h>

enum {
    COLUMNS = 64,         /* of a task of an entry */
    LEAST_BLOCKS = 4,     /* that a task puts together, if it does not put all of a row */
    LEAST_HEADS = 8       /* of attention that a task keeps together */
};

typedef struct {
    const Segment *segment;
    int64_t row, position;
} Place;

typedef struct {
    const Plan *plan;
    const Op *op;
    const Segment *segments;
    const Place *places;
    int64_t parts, per_task, stride, blocks; /* tasks of a place, blocks or heads of a task; bytes of a place in the room, blocks there at most */
} Work;

void keep_row(const Plan *plan, const float *x, int64_t width, char *to)
{
    plan->kernels->narrow(x, to, plan->type, width);
    for (int64_t i = 0; i < width; i++) {
        if (plan->rounds) {
            uint16_t *bits = (uint16_t *)to + i;
            if ((*bits & 0x7F80) == 0x7F80)
                *bits = *bits & 0x7F ? 0 : (*bits & 0x8000) | 0x7F7F;
        } else {
            uint32_t *bits = (uint32_t *)to + i;
            if ((*bits & 0x7F800000) == 0x7F800000)
                *bits = *bits & 0x7FFFFF ? 0 : (*bits & 0x80000000) | 0x7F7FFFFF;
        }
    }
}

char *entry_at(const Plan *plan, char *const *blocks, int64_t offset, int64_t number, int64_t rate, int64_t width)
{
    return blocks[((number + 1) * rate - 1) / BLOCK] + offset + number % entries_of_block(rate) * kept_bytes(plan, width);
}

void turn_rows(const Kind *kind, char *const *rows, int64_t count, char *block)
{
    int64_t panel = key_bytes(kind) / (BLOCK / SIDE), words = ceil_div(kind->width * (kind->rounds ? 2 : 4), 4);
    if (count < BLOCK || words * LINE < panel)
        memset(block, 0, (size_t)key_bytes(kind));
    for (int64_t i = 0; i < count; i++) {
        char *to = block + i / SIDE * panel + i % SIDE * 4;
        for (int64_t word = 0; word < words; word++)
            memcpy(to + word * LINE, rows[i] + word * 4, 4);
    }
}

/* Rows of all segments, or those whose positions are the last of an entry: how many. */
static int64_t places(const Segment *segments, int64_t num_segments, int64_t rate, Place *out)
{
    int64_t found = 0;
    for (const Segment *s = segments; s < segments + num_segments; s++)
        for (int64_t i = 0; i < s->count; i++)
            if ((s->start + i + 1) % rate == 0)
                out[found++] = (Place){s, s->row + i, s->start + i};
    return found;
}

/* -- COMPRESS: values, gates, target, rate, is_doubled; bias [rate, width of values] -------------------------------------------------
 *
 * Values and gates of a session's last positions lie in a ring (Segment.now): as many as the entries of a step need that begins at most
 * MOST_BACK positions back. A step reads those of its own rows from their registers, and writes them to the ring when its entries are
 * made, so that it may be longer than the ring. In a block of 64 positions lies what an entry that begins behind the block has of it. */

int64_t ring_rows(const Op *op) { return MOST_BACK + op->numbers[3] * (1 + op->numbers[4]); }
static int64_t pair_bytes(const Plan *plan, int64_t number) { return 2 * kept_bytes(plan, plan->widths[number]); }
int64_t ring_bytes(const Plan *plan, const Op *op) { return ring_rows(op) * pair_bytes(plan, op->numbers[0]); }
/* The last positions of a block of which it has what the entry behind them takes. */
static int64_t last_rows(const Op *op) { return op->numbers[4] ? at_most(op->numbers[3], BLOCK) : 0; }
int64_t compress_bytes(const Plan *plan, const Op *op) { return last_rows(op) * pair_bytes(plan, op->numbers[2]); }

static char *ring_at(const Plan *plan, const Op *op, const Segment *s, int64_t position)
{
    return s->now + op->now + position % ring_rows(op) * pair_bytes(plan, op->numbers[0]);
}

/* Null where the block does not have it. */
static char *last_at(const Plan *plan, const Op *op, const Segment *s, int64_t position)
{
    int64_t row = position % BLOCK - BLOCK + last_rows(op);
    return row < 0 ? 0 : s->blocks[position / BLOCK] + op->cache + row * pair_bytes(plan, op->numbers[2]);
}

static void keep_pair(const Plan *plan, const Op *op, int64_t row, int64_t width, char *to)
{
    keep_row(plan, row_of(plan, op->numbers[0], row), width, to);
    keep_row(plan, row_of(plan, op->numbers[1], row), width, to + kept_bytes(plan, width));
}

static void keep_task(const void *argument, int64_t row, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Segment *s = segment_of(work->segments, row);
    int64_t position = s->start + row - s->row;
    char *last = last_at(plan, work->op, s, position);
    (void)scratch;
    if (position >= s->start + s->count - ring_rows(work->op)) /* else a later row has its place */
        keep_pair(plan, work->op, row, plan->widths[n[0]], ring_at(plan, work->op, s, position));
    if (last)
        keep_pair(plan, work->op, row, plan->widths[n[2]], last);
}

/* Columns of the values and gates of a position, as caches hold them. is_before: those that the entry behind the position's own takes. */
static void take_columns(const Work *work, const Place *place, int64_t position, int64_t is_before, int64_t at, int64_t count, float *values,
                         float *gates)
{
    const Plan *plan = work->plan;
    const Segment *s = place->segment;
    _Alignas(LINE) char rounded[2][COLUMNS * 4];
    const char *from[2] = {rounded[0], rounded[1]};
    int64_t size = size_of_type(plan->type), first = place->position + 1 - work->op->numbers[3];
    if (position >= s->start) {
        for (int i = 0; i < 2; i++)
            keep_row(plan, row_of(plan, work->op->numbers[i], s->row + position - s->start) + at, count, rounded[i]);
    } else {
        int64_t in_block = is_before && first % BLOCK == 0;
        from[0] = (in_block ? last_at(plan, work->op, s, position) : ring_at(plan, work->op, s, position)) + at * size;
        from[1] = from[0] + kept_bytes(plan, plan->widths[work->op->numbers[in_block ? 2 : 0]]);
    }
    plan->kernels->widen(from[0], plan->type, 1, values, count, 0);
    plan->kernels->widen(from[1], plan->type, 1, gates, count, 0);
}

/* Some columns of an entry. */
static void compress_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const Kernels *kernels = plan->kernels;
    const int64_t *n = work->op->numbers;
    const Place *place = work->places + task / work->parts;
    int64_t column = task % work->parts * COLUMNS, wide = plan->widths[n[0]], width = plan->widths[n[2]], rate = n[3];
    int64_t count = at_most(width - column, COLUMNS), rows = rate * (1 + n[4]);
    int64_t first = place->position + 1 < rows ? rate : 0; /* there is no entry before the first one */
    float *values = scratch, *gates = values + rows * COLUMNS;
    for (int64_t i = first; i < rows; i++) {
        int64_t is_own = !n[4] || i >= rate, at = column + (n[4] && is_own ? width : 0);
        take_columns(work, place, place->position - rows + 1 + i, !is_own, at, count, values + i * COLUMNS, gates + i * COLUMNS);
        kernels->add(gates + i * COLUMNS, (const float *)work->op->tensors[0].data + i % rate * wide + at, 1, gates + i * COLUMNS, count, 0);
    }
    kernels->pool(gates + first * COLUMNS, values + first * COLUMNS, rows - first, COLUMNS, count, row_of(plan, n[2], place->row) + column);
}

int compress_run(const Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows)
{
    const int64_t *n = op->numbers;
    int64_t width = plan->widths[n[2]], wide = plan->widths[n[0]], each = n[3] * (1 + n[4]);
    Place found[CHUNK];
    Work work = {.plan = plan, .op = op, .segments = segments, .places = found, .parts = ceil_div(width, COLUMNS)};
    int64_t count = places(segments, num_segments, n[3], found);
    for (int64_t row = 0; row < rows; row++)
        memset(row_of(plan, n[2], row), 0, (size_t)width * 4);
    int failed = count ? team_run(team, members_for(threads, count * each * width * 16), compress_task, &work, count * work.parts, each * COLUMNS * 8) : 0;
    return failed ? failed : team_run(team, members_for(threads, rows * wide * 8), keep_task, &work, rows, 0);
}

/* -- ATTEND_ENTRIES: query, key, entry, target, heads, window, rate, the register of chosen entries (0: all that a row sees); scale; sinks - */

int64_t entries_bytes(const Plan *plan, const Op *op)
{
    return (BLOCK + entries_of_block(op->numbers[6])) * kept_bytes(plan, plan->widths[op->numbers[1]]);
}

static Kind kind_of(const Plan *plan, const Op *op)
{
    int64_t width = plan->widths[op->numbers[1]];
    return (Kind){.groups = op->numbers[4], .width = width, .value_width = width, .rounds = plan->rounds, .is_latent = 1, .scale = (float)op->reals[0]};
}

/* Of positions, of entries, that a row sees. */
static int64_t near_of(const Op *op, int64_t position) { return at_most(position + 1, op->numbers[5]); }
static int64_t far_of(const Plan *plan, const Op *op, int64_t position)
{
    int64_t all = (position + 1) / op->numbers[6];
    return op->numbers[7] ? at_most(all, plan->widths[op->numbers[7]]) : all;
}

static void remember_task(const void *argument, int64_t row, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Segment *s = segment_of(work->segments, row);
    int64_t position = s->start + row - s->row, width = plan->widths[n[1]], bytes = kept_bytes(plan, width), entry = (position + 1) / n[6] - 1;
    (void)scratch;
    keep_row(plan, row_of(plan, n[1], row), width, s->blocks[position / BLOCK] + work->op->cache + position % BLOCK * bytes);
    if ((position + 1) % n[6] == 0)
        keep_row(plan, row_of(plan, n[2], row), width, entry_at(plan, s->blocks, work->op->cache + BLOCK * bytes, entry, n[6], width));
}

/* Where key `i` of those that a row attends to lies: of its positions, then of its entries. */
static char *key_at(const Work *work, const Place *place, int64_t i)
{
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    int64_t near = near_of(work->op, place->position), width = plan->widths[n[1]], bytes = kept_bytes(plan, width);
    char *const *blocks = place->segment->blocks;
    if (i < near) {
        int64_t position = place->position - near + 1 + i;
        return blocks[position / BLOCK] + work->op->cache + position % BLOCK * bytes;
    }
    int64_t entry = i - near, last = (place->position + 1) / n[6] - 1;
    if (n[7]) {
        float chosen = row_of(plan, n[7], place->row)[entry];
        entry = chosen >= 0 && chosen <= (float)last ? (int64_t)chosen : last;
    }
    return entry_at(plan, blocks, work->op->cache + BLOCK * bytes, entry, n[6], width);
}

/* Some blocks of what a row attends to. */
static void gather_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Place *place = work->places + task / work->parts;
    Kind kind = kind_of(work->plan, work->op);
    int64_t count = near_of(work->op, place->position) + far_of(work->plan, work->op, place->position);
    int64_t first = task % work->parts * work->per_task, end = at_most(ceil_div(count, BLOCK), first + work->per_task);
    char **table = (char **)(work->plan->index_room + task / work->parts * work->stride), *gathered = (char *)table + table_bytes(work->blocks);
    (void)scratch;
    for (int64_t block = first; block < end; block++) {
        char *rows[BLOCK];
        int64_t some = at_most(count - block * BLOCK, BLOCK);
        for (int64_t i = 0; i < some; i++)
            rows[i] = key_at(work, place, block * BLOCK + i);
        table[block] = gathered + block * key_bytes(&kind);
        turn_rows(&kind, rows, some, table[block]);
    }
}

/* Some query heads of a row. */
static void attend_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    const Plan *plan = work->plan;
    const int64_t *n = work->op->numbers;
    const Place *place = work->places + task / work->parts;
    int64_t head = task % work->parts * work->per_task, count = near_of(work->op, place->position) + far_of(plan, work->op, place->position);
    Kind kind = kind_of(plan, work->op);
    Keys keys = {(char *const *)(plan->index_room + task / work->parts * work->stride), 0};
    const float *sinks = work->op->tensors[0].data;
    kind.groups = at_most(kind.groups - head, work->per_task);
    plan->kernels->attend(&kind, row_of(plan, n[0], place->row) + head * kind.width, 0, &keys, count - 1, 1, sinks ? sinks + head : 0,
                          row_of(plan, n[3], place->row) + head * kind.width, 0, scratch);
}

int entries_run(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows)
{
    const int64_t *n = op->numbers;
    Place found[CHUNK];
    int64_t count = places(segments, num_segments, 1, found), most = 0;
    Kind kind = kind_of(plan, op);
    Work work = {.plan = plan, .op = op, .segments = segments};
    int failed = team_run(team, members_for(threads, rows * kind.width * 16), remember_task, &work, rows, 0);
    for (int64_t i = 0; i < count; i++) {
        int64_t seen = near_of(op, found[i].position) + far_of(plan, op, found[i].position);
        most = seen > most ? seen : most;
    }
    work.blocks = ceil_div(most, BLOCK), work.stride = table_bytes(work.blocks) + work.blocks * key_bytes(&kind);
    int64_t at_once = rows_with_room(plan, work.stride, count);
    failed = failed ? failed : at_once ? 0 : -1;
    for (int64_t first = 0; first < count && !failed; first += at_once) {
        int64_t some = at_most(count - first, at_once), members = members_for(threads, some * most * n[4] * kind.width * 2);
        work.places = found + first;
        work.parts = divide(&work.per_task, members, some, work.blocks, LEAST_BLOCKS);
        failed = team_run(team, members, gather_task, &work, some * work.parts, 0);
        work.parts = divide(&work.per_task, members, some, n[4], LEAST_HEADS);
        failed = failed ? failed : team_run(team, members, attend_task, &work, some * work.parts, attend_scratch(&kind));
    }
    return failed;
}
