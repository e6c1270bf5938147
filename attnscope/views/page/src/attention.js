// Multi-head attention in the open, on an example small enough to read: five tokens, width 4.

export const TOKENS = ["The", "cat", "sat", "on", "mat"];
export const WIDTH = 4;

// Embeddings are one-hot, so that a projection's row i is what token i gets from it.
const X = TOKENS.map((_, row) => TOKENS.map((_, column) => (row === column ? 1 : 0)));
const W_Q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]];
const W_K = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]];
const W_V = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]];

export const OUTPUTS = {
  identity: [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
  mixing: [[0.5, 0.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5], [0.5, 0.5, -0.5, -0.5], [0.5, -0.5, -0.5, 0.5]],
};

export function times(a, b) {
  return a.map((row) => b[0].map((_, column) => row.reduce((sum, value, at) => sum + value * b[at][column], 0)));
}

const columnsOf = (matrix, head, width) => matrix.map((row) => row.slice(head * width, (head + 1) * width));

/** exp(s) / sum exp(s), row by row. */
function softmax(scores) {
  return scores.map((row) => {
    const largest = Math.max(...row);
    const raised = row.map((score) => Math.exp(score - largest));
    const total = raised.reduce((sum, value) => sum + value, 0);
    return raised.map((value) => value / total);
  });
}

export function worked(n_heads, W_O) {
  const width = WIDTH / n_heads;
  const [Q, K, V] = [W_Q, W_K, W_V].map((weights) => times(X, weights));
  const heads = Array.from({ length: n_heads }, (_, head) => {
    const [q, k, v] = [Q, K, V].map((matrix) => columnsOf(matrix, head, width));
    const score = (query, key) => query.reduce((sum, value, at) => sum + value * key[at], 0) / Math.sqrt(width);
    const scores = q.map((query) => k.map((key) => score(query, key)));
    const weights = softmax(scores);
    return { q, k, v, scores, weights, output: times(weights, v) };
  });
  const joined = TOKENS.map((_, token) => heads.flatMap((head) => head.output[token]));
  return { X, W_Q, W_K, W_V, W_O, Q, K, V, width, heads, joined, output: times(joined, W_O) };
}
