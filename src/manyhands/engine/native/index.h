/* Positions that an indexer chooses (index.c). */
#ifndef MANYHANDS_INDEX_H
#define MANYHANDS_INDEX_H
#include "plan.h"

enum { MOST_CHOSEN_FROM = 1 << 24 }; /* positions: a register holds their numbers, which are exact in fp32 */
/* Bytes of the addresses of so many blocks, before blocks that are put together. */
static inline int64_t table_bytes(int64_t blocks) { return ceil_div(blocks * (int64_t)sizeof(char *), LINE) * LINE; }
/* INDEX: index keys of all rows into their caches, and of each row the positions that it sees into the target. 0, or -1: no memory. */
int index_run(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows);
/* The index keys of a layer: what an operation's block of a cache holds of them. */
Kind index_kind(const Plan *plan, const Op *op);
/* Of segments the parts whose rows see all their positions, as at most `most` are chosen: how many. */
int64_t seeing_all(const Op *op, const Segment *segments, int64_t num_segments, int64_t most, Segment *out);
/* Positions, or entries, that the register of an ATTENTION names at most. */
int64_t attention_most(const Plan *plan, const Op *op);
/* Rows, of `count`, for which the plan's room has `stride` bytes each at once; 0: no memory. */
int64_t rows_with_room(Plan *plan, int64_t stride, int64_t count);
/* Tasks of each of `rows` rows among which `whole` (blocks, heads) is divided, if some members share a row, and of how many each is: of
 * `least` at least. */
int64_t divide(int64_t *per_task, int64_t members, int64_t rows, int64_t whole, int64_t least);
/* ATTENTION of the other rows, over what the register of chosen positions names. 0, or -1: no memory. */
int attend_chosen(Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments);
#endif
