/* Blocks of numbers turned over in registers of four: what packing, and values kept as keys, are made of. */
#ifndef MANYHANDS_PANELS_H
#define MANYHANDS_PANELS_H
#include <stdint.h>
#include <string.h>

typedef uint32_t Four __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define JOINED(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define JOINED(a, b, i, j, k, l) __builtin_shuffle(a, b, (Four){i, j, k, l})
#endif

static inline Four four(const void *at)
{
    Four found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* to[i][j] = from[j][i] for `rows` rows j of `columns` words (multiples of 4); steps: words from a row to the next. */
static inline __attribute__((always_inline)) void turn_over(const uint32_t *from, int64_t from_step, uint32_t *to, int64_t to_step, int64_t rows, int64_t columns)
{
    for (int64_t i = 0; i < columns; i += 4)
        for (int64_t j = 0; j < rows; j += 4) {
            const uint32_t *at = from + j * from_step + i;
            Four a = four(at), b = four(at + from_step), c = four(at + 2 * from_step), d = four(at + 3 * from_step);
            Four ab = JOINED(a, b, 0, 4, 1, 5), cd = JOINED(c, d, 0, 4, 1, 5), ef = JOINED(a, b, 2, 6, 3, 7), gh = JOINED(c, d, 2, 6, 3, 7);
            Four out[4] = {JOINED(ab, cd, 0, 1, 4, 5), JOINED(ab, cd, 2, 3, 6, 7), JOINED(ef, gh, 0, 1, 4, 5), JOINED(ef, gh, 2, 3, 6, 7)};
            for (int r = 0; r < 4; r++)
                memcpy(to + (i + r) * to_step + j, out + r, sizeof out[r]);
        }
}
#endif
