// What ops/cuda_experts.py plans on the host, planned where the router's choice is: picks, which are (row, expert)
// pairs, grouped by expert and then by row, and jobs of up to `batch` picks of one expert. One block.
#include "common.cuh"

// chosen, weights: [rows][k], of which the first `live[0]` rows count. jobs: [most][4] as in matmul.cu, those that
// nobody needs with no pick; row: of each pick; order, weight: the picks of a row in ascending order of experts;
// begin: [rows + 1] of each row in these. Shared: two ints a pick.
__global__ void __launch_bounds__(256)
plan_picks(const int* __restrict__ chosen, const float* __restrict__ weights, const int* __restrict__ live,
           int* __restrict__ jobs, int* __restrict__ row, int* __restrict__ order, float* __restrict__ weight,
           int* __restrict__ begin, int rows, int k, int experts, int layer, int batch, int most) {
  const int t = threadIdx.x, used = min(rows, live[0]), picks = used * k;
  int *expert = clb_shared<int>(), *place = expert + rows * k;  // of each pick, its place among those of its expert
  for (int p = t; p < picks; p += blockDim.x) expert[p] = chosen[p];
  __syncthreads();
  for (int p = t; p < picks; p += blockDim.x) {
    int before = 0;
    for (int q = 0; q < p; ++q) before += expert[q] == expert[p];
    place[p] = before;
  }
  __syncthreads();
  for (int p = t; p < picks; p += blockDim.x) {
    const int mine = expert[p], r = p / k;
    int less = 0, same = 0, job = 0, rank = 0;
    for (int q = 0; q < picks; ++q) {
      less += expert[q] < mine, same += expert[q] == mine;
      job += expert[q] < mine && place[q] % batch == 0;
    }
    for (int q = r * k; q < (r + 1) * k; ++q) rank += expert[q] < mine || (expert[q] == mine && q < p);
    const int at = less + place[p];
    row[at] = r, order[r * k + rank] = at, weight[r * k + rank] = weights[p];
    if (place[p] % batch == 0) {
      int* out = jobs + 4 * (job + place[p] / batch);
      out[0] = layer * experts + mine, out[1] = at, out[2] = min(batch, same - place[p]), out[3] = 0;
    }
  }
  int made = 0;
  for (int q = 0; q < picks; ++q) made += place[q] % batch == 0;
  for (int j = made + t; j < most; j += blockDim.x)
    for (int i = 0; i < 4; ++i) jobs[4 * j + i] = 0;
  for (int r = t; r <= rows; r += blockDim.x) begin[r] = min(r, used) * k;
}
