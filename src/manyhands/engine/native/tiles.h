/* AMX: products of 16 rows with a step of a panel in one instruction, TDPBF16PS. That it computes the chain of
 * docs/arithmetic.md is what Intel's manual says; a machine whose tiles do not is found by the golden digests at start.
 * With TILES_EMULATED, what the manual says, in lanes: so that all but the instruction runs where there is no AMX. */
#ifndef MANYHANDS_TILES_H
#define MANYHANDS_TILES_H
#include "kernels.h"
#include "lanes.h"

enum { TILE_BYTES = 1024, TILE_LINE = 64 };

#ifdef TILES_EMULATED
static __thread char tiles[8][TILE_BYTES];
#define tile_zero(n) memset(tiles[n], 0, TILE_BYTES)
#define tile_load(n, at) memcpy(tiles[n], at, TILE_BYTES)
#define tile_store(n, at) memcpy(at, tiles[n], TILE_BYTES)
#define tile_product_sum(c, a, b) emulate(tiles[c], tiles[a], tiles[b])
static void tiles_begin(void) {}
static void tiles_end(void) {}
static void emulate(char *sums, const char *rows, const char *panel)
{
    for (int r = 0; r < SIDE; r++) {
        V even = set(0), odd = set(0);
        half_t row[DEPTH];
        float sum[SIDE];
        memcpy(row, rows + r * TILE_LINE, sizeof row);
        memcpy(sum, sums + r * TILE_LINE, sizeof sum);
        for (int i = 0; i < SIDE; i++) {
            half_t pair[DEPTH];
            memcpy(pair, panel + i * TILE_LINE, sizeof pair);
            even = fma_(set(real_of((uint32_t)row[2 * i] << 16)), even_bf16(pair), even);
            odd = fma_(set(real_of((uint32_t)row[2 * i + 1] << 16)), odd_bf16(pair), odd);
        }
        store(sum, add(load(sum), add(even, odd)));
        memcpy(sums + r * TILE_LINE, sum, sizeof sum);
    }
}
#else
#define tile_zero(n) _tile_zero(n)
#define tile_load(n, at) _tile_loadd(n, at, TILE_LINE)
#define tile_store(n, at) _tile_stored(n, at, TILE_LINE)
#define tile_product_sum(c, a, b) _tile_dpbf16ps(c, a, b)
static void tiles_begin(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++)
        all.line_bytes[i] = TILE_LINE, all.lines[i] = SIDE;
    _tile_loadconfig(&all);
}
static void tiles_end(void) { _tile_release(); }
#endif

/* Rows of a Source in tiles: bf16, [step][row][32], a multiple of 16 rows. */
static inline const char *tile_of(const Source *source, int64_t step, int64_t row)
{
    return (const char *)source->rows + (step * ceil_div(source->count, SIDE) * SIDE + row) * TILE_LINE;
}

/* sums [panel][row][16] = `panels` panels of all rows: two panels and 32 rows at once, each sum in a tile through all of K. */
static void tile_product(const Source *source, const char *packed, int64_t panels, float *sums)
{
    int64_t depth = source->depth, rows = ceil_div(source->count, SIDE) * SIDE;
    for (int64_t p = 0; p < panels; p += 2)
        for (int64_t row = 0; row < rows; row += 2 * SIDE) {
            int has_panel = p + 1 < panels, has_rows = row + SIDE < rows;
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
            for (int64_t step = 0; step < depth; step++) {
                const char *panel = packed + (p * depth + step) * TILE_BYTES;
                tile_load(4, tile_of(source, step, row));
                tile_load(6, panel);
                tile_product_sum(0, 4, 6);
                if (has_panel) {
                    tile_load(7, panel + depth * TILE_BYTES);
                    tile_product_sum(1, 4, 7);
                }
                if (has_rows) {
                    tile_load(5, tile_of(source, step, row + SIDE));
                    tile_product_sum(2, 5, 6);
                }
                if (has_panel && has_rows)
                    tile_product_sum(3, 5, 7);
            }
            float *to = sums + (p * CHUNK + row) * SIDE;
            tile_store(0, to);
            if (has_panel)
                tile_store(1, to + CHUNK * SIDE);
            if (has_rows)
                tile_store(2, to + SIDE * SIDE);
            if (has_panel && has_rows)
                tile_store(3, to + (CHUNK + SIDE) * SIDE);
        }
}
#endif
