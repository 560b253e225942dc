/* Row-invariant attention over the sessions' caches, bf16, with AMX tiles.
 *
 * A row is one query head of one new token. It attends to the positions 0 .. its own of its session, in blocks of 64 keys that
 * begin at multiples of 64, in order: a running softmax in fp32 (soften.c), weights rounded to bf16, sums of weights x values
 * as chains of TDPBF16PS in fp32, one division at the end, one rounding. 16 rows share a tile; blocks that none of them may
 * see are left out, and one that a row may not see leaves it as it was, bit for bit: its greatest score stays, so its sums are
 * multiplied by one and zeros are added. So neither the rows beside it, nor their number, nor keys behind its own position
 * enter a row.
 *
 * Scores are keys x queries: the tile of keys is read where it lies, and the 16 rows are 16 lanes for the softmax.
 */
#include "attend.h"

#include <math.h>
#include <string.h>

enum {
    TILES = 8,      /* tiles of rows that a task takes through the keys at once */
    SHARED = 24,    /* blocks x tiles of rows from which sharing is faster: some 10 us of work */
};

/* [heads, rows, width], apart in memory by so many elements; a row's numbers side by side. */
typedef struct {
    const bf16 *data;
    int64_t head, row;
} Heads;

typedef struct {
    Work work;
    const Kind *kind;
    const Segment *segments;
    int64_t num_segments, group; /* group: query heads of a key head */
    Heads query;
    const bf16 *sinks;
    bf16 *out;
} Job;

/* Up to TILES x 16 rows of one segment and one key head; row r is token r / group, head r % group. */
typedef struct {
    const Segment *segment;
    const bf16 *keys, *values;
    int64_t head, first, count, width;
} Task;

/* What a member keeps: of a task's rows queries, sums and softmax; of a block the end of the keys, if its width ends within a
 * tile, and the values, as tiles. */
typedef struct {
    bf16 *query, *tail, *values;
    float *sums;
    Rows *rows;
} Room;

static int64_t position(const Job *job, const Task *task, int64_t row)
{
    return task->segment->start + at_most(task->first + row, task->first + task->count - 1) / job->group;
}

/* The first key that a row at `position` may see. */
static int64_t oldest(const Kind *kind, int64_t position)
{
    return kind->window && position >= kind->window ? position - kind->window + 1 : 0;
}

/* Queries of 16 rows as tiles [K/32][16 pairs][16 rows][2]; zeros for rows and numbers that there are not. */
static void pack_queries(const Job *job, const Task *task, int64_t tile, bf16 *packed)
{
    int64_t dim = job->kind->key_dim;
    for (int64_t k = 0; k < dim; k += DEPTH, packed += TILE) {
        __mmask32 mask = dim - k >= DEPTH ? ~0u : (1u << (dim - k)) - 1;
        __m512i rows[SIDE];
        for (int64_t i = 0; i < SIDE; i++) {
            int64_t row = task->first + tile * SIDE + i, token = row / job->group;
            const bf16 *from = job->query.data + (task->head * job->group + row % job->group) * job->query.head +
                               (task->segment->row + token) * job->query.row + k;
            rows[i] = tile * SIDE + i < task->count ? _mm512_maskz_loadu_epi16(mask, from) : _mm512_setzero_si512();
        }
        transpose(rows);
        for (int64_t i = 0; i < SIDE; i++)
            _mm512_store_si512(packed + i * DEPTH, rows[i]);
    }
}

static void begin_rows(const Job *job, const Task *task, int64_t tile, Rows *rows)
{
    int places[SIDE], since[SIDE];
    float max[SIDE], sum[SIDE];
    for (int64_t i = 0; i < SIDE; i++) {
        int64_t at = position(job, task, tile * SIDE + i), head = (task->first + tile * SIDE + i) % job->group;
        places[i] = (int)at;
        since[i] = (int)oldest(job->kind, at);
        uint32_t sink = job->sinks ? (uint32_t)job->sinks[task->head * job->group + head] << 16 : 0;
        memcpy(&max[i], &sink, sizeof sink);
        max[i] = job->sinks ? max[i] * 1.44269504f : -INFINITY; /* a sink is one more key, of value zero */
        sum[i] = job->sinks ? 1 : 0;
    }
    *rows = (Rows){_mm512_loadu_ps(max), _mm512_loadu_ps(sum), _mm512_loadu_si512(places), _mm512_loadu_si512(since)};
}

/* Divides the sums of up to 16 rows, and rounds them into out [tokens, heads, Dv]. */
static void finish_rows(const Job *job, const Task *task, int64_t tile, const Room *room)
{
    const Kind *kind = job->kind;
    const float *sums = room->sums + tile * value_tiles(kind) * SIDE * SIDE;
    float factor[SIDE];
    _mm512_storeu_ps(factor, _mm512_div_ps(_mm512_set1_ps(1), room->rows[tile].sum));
    for (int64_t i = 0; i < SIDE && tile * SIDE + i < task->count; i++) {
        int64_t row = task->first + tile * SIDE + i, head = task->head * job->group + row % job->group;
        bf16 *to = job->out + ((task->segment->row + row / job->group) * kind->heads + head) * kind->value_dim;
        for (int64_t d = 0; d < kind->value_dim; d += SIDE) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(sums + d * SIDE + i * SIDE), _mm512_set1_ps(factor[i]));
            /* A block that is not seen may turn -0 into 0: so be it for all. */
            put(to + d, kind->value_dim - d, _mm512_add_ps(value, _mm512_setzero_ps()));
        }
    }
}

/* One tile of rows and one block of keys. */
static void step(const Job *job, const Task *task, int64_t tile, int64_t block, const Room *room)
{
    const Kind *kind = job->kind;
    int64_t last = position(job, task, tile * SIDE + SIDE - 1), first = position(job, task, tile * SIDE);
    if (last < block || oldest(kind, first) >= block + BLOCK)
        return;
    float scores[BLOCK * SIDE] __attribute__((aligned(64))), decay[SIDE];
    bf16 weights[2 * TILE] __attribute__((aligned(64)));
    int halves = last - block < HALF ? 1 : 2, masked = first < block + BLOCK - 1 || oldest(kind, last) > block;
    float *sums = room->sums + tile * value_tiles(kind) * SIDE * SIDE;
    score(kind, task->keys + block * task->width, task->width, room->tail, room->query + tile * key_tiles(kind) * TILE, halves,
          scores);
    if (soften(kind, &room->rows[tile], scores, block, halves, masked, weights, decay))
        rescale(sums, value_tiles(kind), decay);
    add_values(value_tiles(kind), weights, room->values, halves, sums);
}

static void run_task(const Job *job, const Task *task, const Room *room)
{
    const Kind *kind = job->kind;
    int64_t tiles = ceil_div(task->count, SIDE), end = position(job, task, task->count - 1) + 1;
    memset(room->sums, 0, tiles * value_tiles(kind) * SIDE * SIDE * sizeof(float));
    for (int64_t tile = 0; tile < tiles; tile++) {
        pack_queries(job, task, tile, room->query + tile * key_tiles(kind) * TILE);
        begin_rows(job, task, tile, &room->rows[tile]);
    }
    for (int64_t block = oldest(kind, position(job, task, 0)) / BLOCK * BLOCK; block < end; block += BLOCK) {
        int64_t count = at_most(BLOCK, ceil_div(end - block, HALF) * HALF);
        const bf16 *keys = task->keys + block * task->width;
        pack_tail(kind, keys, task->width, count, room->tail);
        pack_values(kind, keys, task->values + block * task->width, task->width, count, room->values);
        for (int64_t tile = 0; tile < tiles; tile++)
            step(job, task, tile, block, room);
    }
    for (int64_t tile = 0; tile < tiles; tile++)
        finish_rows(job, task, tile, room);
}

static int64_t parts_of(const Job *job, const Segment *segment) { return ceil_div(segment->count * job->group, TILES * SIDE); }

/* Tasks in the order of segments, key heads, rows. */
static Task task_of(const Job *job, int64_t index)
{
    const Segment *segment = job->segments;
    for (; index >= job->kind->key_heads * parts_of(job, segment); segment++)
        index -= job->kind->key_heads * parts_of(job, segment);
    const Layer *layer = &segment->layers[job->kind->layer];
    int64_t parts = parts_of(job, segment), head = index / parts, first = index % parts * TILES * SIDE;
    int64_t count = at_most(segment->count * job->group - first, TILES * SIDE);
    int64_t offset = head * segment->capacity * layer->width;
    return (Task){segment, layer->keys + offset, layer->values + offset, head, first, count, layer->width};
}

static int make_room(Work *work, Member *member, Room *room)
{
    const Kind *kind = ((Job *)work)->kind;
    int64_t query = TILES * key_tiles(kind) * TILE, tail = BLOCK * DEPTH, values = 2 * value_tiles(kind) * TILE;
    int64_t sums = TILES * value_tiles(kind) * SIDE * SIDE;
    int64_t bytes = (query + tail + values) * (int64_t)sizeof(bf16) + sums * (int64_t)sizeof(float);
    char *at = room_of(work, member, bytes + TILES * (int64_t)sizeof(Rows));
    if (!at)
        return 0;
    room->rows = (Rows *)at;
    room->sums = (float *)(room->rows + TILES);
    room->query = (bf16 *)(room->sums + sums);
    room->tail = room->query + query;
    room->values = room->tail + tail;
    return 1;
}

static void share(Work *work, Member *members, int self)
{
    const Job *job = (Job *)work;
    Room room;
    if (!make_room(work, &members[self], &room))
        return;
    configure(SIDE);
    int turn = 0;
    for (int64_t index; (index = take_task(work, members, self, &turn)) >= 0;) {
        Task task = task_of(job, index);
        run_task(job, &task, &room);
    }
    _tile_release();
}

/* Writes a segment's new rows into one of its caches [heads, capacity, width]. */
static void keep(const Segment *segment, const Layer *layer, Heads new, int64_t width, bf16 *cache)
{
    for (int64_t head = 0; head < layer->heads; head++)
        for (int64_t i = 0; i < segment->count; i++)
            memcpy(cache + (head * segment->capacity + segment->start + i) * layer->width,
                   new.data + head * new.head + (segment->row + i) * new.row, width * sizeof(bf16));
}

static int fits(const Kind *kind, const Segment *segment, int64_t num_rows)
{
    if (segment->count < 0 || segment->row < 0 || segment->row + segment->count > num_rows)
        return 0;
    if (kind->layer >= segment->num_layers || segment->start < 0)
        return 0;
    const Layer *layer = &segment->layers[kind->layer];
    int64_t width = kind->key_dim > kind->value_dim ? kind->key_dim : kind->value_dim;
    return layer->heads == kind->key_heads && layer->width == width && segment->capacity % BLOCK == 0 &&
           segment->start + segment->count <= segment->capacity;
}

/* Attention of one layer for a step of `num_rows` rows: keys and values of the segments' rows are written into their caches,
 * then out[num_rows, heads, Dv] (contiguous) is written at their rows, by at most `threads` members of `team`.
 * sinks: [heads] or null. 0; 1 if there was no memory for a copy of some rows; 2 if a segment does not fit its cache or the
 * step, and then nothing is written. */
int tiles_attend(Team *team, int64_t threads, const Kind *kind, const Segment *segments, int64_t num_segments, int64_t num_rows,
                 const bf16 *query, int64_t query_head, int64_t query_row, const bf16 *key, int64_t key_head, int64_t key_row,
                 const bf16 *value, int64_t value_head, int64_t value_row, const bf16 *sinks, bf16 *out)
{
    Job job = {.work = {.share = share}, .kind = kind, .segments = segments, .num_segments = num_segments,
               .group = kind->heads / kind->key_heads, .query = {query, query_head, query_row}, .sinks = sinks, .out = out};
    int64_t blocks = 0;
    for (int64_t i = 0; i < num_segments; i++)
        if (!fits(kind, &segments[i], num_rows))
            return 2;
    for (const Segment *s = segments; s < segments + num_segments; s++) {
        const Layer *layer = &s->layers[kind->layer];
        int64_t keys = s->start + s->count;
        keep(s, layer, (Heads){key, key_head, key_row}, kind->key_dim, layer->keys);
        keep(s, layer, (Heads){value, value_head, value_row}, kind->value_dim, layer->values);
        job.work.tasks += kind->key_heads * parts_of(&job, s);
        keys = kind->window ? at_most(keys, kind->window + s->count) : keys;
        blocks += kind->key_heads * ceil_div(s->count * job.group, SIDE) * ceil_div(keys, BLOCK);
    }
    job.work.members = blocks < SHARED ? 1 : team_members(team, at_most(threads, job.work.tasks));
    return team_run(team, &job.work);
}
