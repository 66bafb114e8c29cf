"""A language model whose blocks run attention and feed-forward side by side (as in GPT-J and PaLM), which no family of hapt has.
usage: model.py FILE"""
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import hapt

BLOCKS, WIDTH, HEADS, SEQUENCE, VOCAB = 4, 64, 4, 64, 256

graph = hapt.Graph("parallel-blocks", rows=4, sequence=SEQUENCE, vocab=VOCAB, training={"learning-rate": 3e-3, "warmup-steps": 10})
table = graph.parameter("embedding.weight", [VOCAB, WIDTH])
x = graph.op("embedding", graph.tokens, table, graph.parameter("positions.weight", [SEQUENCE, WIDTH]), name="embedding")
for k in range(BLOCKS):
    block = "blocks.%d." % k
    normal = graph.layer_norm(x, block + "norm", WIDTH)
    heads = graph.op("attention", graph.linear(normal, block + "qkv", WIDTH, 3 * WIDTH), name=block + "attention", integers=[HEADS, 1])
    wide = graph.op("gelu", graph.linear(normal, block + "up", WIDTH, 4 * WIDTH), name=block + "gelu")
    x = x + graph.linear(heads, block + "projection", WIDTH, WIDTH) + graph.linear(wide, block + "down", 4 * WIDTH, WIDTH)
x = graph.layer_norm(x, "norm", WIDTH)
logits = graph.op("linear_t", x, table, None, name="logits")  # the table of tokens once more
graph.save(sys.argv[1], loss=graph.cross_entropy(logits))
