/* What comes before attention: norms of the heads, rotary embedding. In place, on rows [queries | keys | values] of all heads
 * as one product gives them. Rounded to bf16 where transformers does: x cos, x sin and their sum; a norm once.
 */
#include "attend.h"

enum { ROWS = 32 }; /* of a task */

typedef struct {
    Work work;
    const Kind *kind;
    const Front *front;
    bf16 *rows;
    int64_t num_rows;
    Turns turns;
} Job;

static __m512 rounded(__m512 x) { return widened((__m256i)_mm512_cvtneps_pbh(x)); }

static __m512 turned(__m512 x, __m512 y, __m512 cos, __m512 sin)
{
    return _mm512_add_ps(rounded(_mm512_mul_ps(x, cos)), rounded(_mm512_mul_ps(y, sin)));
}

/* Numbers i and `turns` + i of x turn together. */
static void turn_halves(bf16 *x, int64_t turns, const bf16 *cos, const bf16 *sin)
{
    for (int64_t i = 0; i < turns; i += SIDE) {
        int64_t count = turns - i;
        __m512 first = get(x + i, count), second = get(x + turns + i, count), c = get(cos + i, count), s = get(sin + i, count);
        put(x + i, count, turned(first, _mm512_sub_ps(_mm512_setzero_ps(), second), c, s));
        put(x + turns + i, count, turned(second, first, c, s));
    }
}

/* Numbers 2 i and 2 i + 1 of x turn together. */
static void turn_pairs(bf16 *x, int64_t turns, const bf16 *cos, const bf16 *sin)
{
    for (int64_t i = 0; i < turns; i += SIDE) {
        __mmask16 mask = lanes(turns - i);
        __m512i both = _mm512_maskz_loadu_epi32(mask, x + 2 * i);
        __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), c = get(cos + i, turns - i), s = get(sin + i, turns - i);
        __m512 second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
        __m512 left = rounded(turned(first, _mm512_sub_ps(_mm512_setzero_ps(), second), c, s));
        __m512i right = _mm512_castps_si512(rounded(turned(second, first, c, s)));
        _mm512_mask_storeu_epi32(x + 2 * i, mask, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(left), 16), right));
    }
}

/* The row of cosines and sines for a row of the step. */
static int64_t turn_of(const Turns *turns, int64_t row)
{
    for (const Segment *s = turns->segments; s < turns->segments + turns->num_segments; s++)
        if (row >= s->row && row < s->row + s->count)
            return s->start + row - s->row;
    return row;
}

static void turn_row(const Job *job, int64_t row)
{
    const Kind *kind = job->kind;
    const Front *front = job->front;
    int64_t heads = kind->heads + kind->key_heads, dim = kind->key_dim;
    int64_t turn = turn_of(&job->turns, row) * job->turns.stride;
    bf16 *x = job->rows + row * (heads * dim + kind->key_heads * kind->value_dim);
    for (int64_t head = 0; head < heads; head++, x += dim) {
        int is_query = head < kind->heads;
        const float *norm = is_query ? front->query_norm : front->key_norm;
        if (norm)
            tiles_norm(x, dim, norm, is_query ? front->query_epsilon : front->key_epsilon, x, 1, dim);
        (front->pairs ? turn_pairs : turn_halves)(x, front->turns, job->turns.cos + turn, job->turns.sin + turn);
    }
}

static void share(Work *work, Member *members, int self)
{
    const Job *job = (Job *)work;
    int turn = 0;
    for (int64_t task; (task = take_task(work, members, self, &turn)) >= 0;)
        for (int64_t row = task * ROWS; row < at_most((task + 1) * ROWS, job->num_rows); row++)
            turn_row(job, row);
}

void front_run(Team *team, int64_t threads, const Kind *kind, const Front *front, bf16 *rows, int64_t num_rows, Turns turns)
{
    Job job = {.work = {.share = share, .tasks = ceil_div(num_rows, ROWS)}, .kind = kind, .front = front, .rows = rows,
               .num_rows = num_rows, .turns = turns};
    job.work.members = team_members(team, at_most(threads, job.work.tasks > 1 ? job.work.tasks : 1));
    team_run(team, &job.work);
}

/* cos, sin: [rows, at least turns], `stride` elements apart. */
void tiles_front(Team *team, int64_t threads, const Kind *kind, const Front *front, bf16 *rows, int64_t num_rows, const bf16 *cos,
                 const bf16 *sin, int64_t stride)
{
    front_run(team, threads, kind, front, rows, num_rows, (Turns){cos, sin, stride, 0, 0});
}
