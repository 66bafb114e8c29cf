/* Runs beside others: it measures no time.
 * The order of rows in epochs: permutations, by counting; different ones for different epochs and seeds; without a
 * preference, by chi squared. */
#include "../../src/train/data_order.h"

#include <stdlib.h>
#include <string.h>

#include "test.h"

static void permutations(int64_t rows, uint64_t seed, int64_t epoch)
{
    char *seen = calloc((size_t)rows, 1);
    int64_t found = 0;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = data_order_row(seed, epoch, rows, i);
        if (!CHECK(row >= 0 && row < rows)) break;
        found += !seen[row];
        seen[row] = 1;
    }
    CHECK_MESSAGE(found == rows, "%lld of %lld rows", (long long)found, (long long)rows);
    free(seen);
}

/* How often row `to` follows at place `from`, over many epochs: a table of equal chances. */
static void no_preference(void)
{
    enum { N = 11, EPOCHS = 22000 };
    double chi = 0, pair = 0;
    static int count[N][N], follows[N][N];
    for (int epoch = 0; epoch < EPOCHS; epoch++)
        for (int i = 0; i < N; i++) {
            const int64_t row = data_order_row(7, epoch, N, i), next = data_order_row(7, epoch, N, (i + 1) % N);
            count[i][row]++;
            follows[row][next]++;
        }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            const double expected = (double)EPOCHS / N, neighbours = (double)EPOCHS / (N - 1);
            chi += (count[i][j] - expected) * (count[i][j] - expected) / expected;
            if (i != j) pair += (follows[i][j] - neighbours) * (follows[i][j] - neighbours) / neighbours;
            CHECK(i != j || follows[i][j] == 0);
        }
    CHECK_MESSAGE(chi < 155 && pair < 165, "chi squared %g and %g", chi, pair); /* 100 and about 99 +- 14 */
}

static void differences(void)
{
    enum { N = 1000 };
    int same_epoch = 0, same_seed = 0, in_place = 0;
    for (int64_t i = 0; i < N; i++) {
        const int64_t row = data_order_row(1, 0, N, i);
        same_epoch += row == data_order_row(1, 1, N, i);
        same_seed += row == data_order_row(2, 0, N, i);
        in_place += row == i;
    }
    CHECK(same_epoch < 10 && same_seed < 10 && in_place < 10);
}

int main(void)
{
    for (int64_t rows = 1; rows <= 300; rows++) permutations(rows, (uint64_t)rows, rows % 7);
    permutations(4096, 1, 0);
    permutations(4097, 1, 1);
    permutations(1000003, 5, 2);
    const int64_t large = ((int64_t)1 << 40) + 12345;
    for (int64_t i = 0; i < 1000; i++) {
        const int64_t row = data_order_row(3, 4, large, large - 1 - i);
        CHECK(row >= 0 && row < large);
    }
    no_preference();
    differences();
    return test_finish();
}
