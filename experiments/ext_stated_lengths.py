r"""Extension: Figure 11 on the lengths that the paper states.

The paper prints 1000 requests with about 101 000 generated tokens, its released generator makes 985 693 (disagreement
D01), and Figure 11's throughput depends on which it was: contexts are tenfold shorter, prompts a fifth of all tokens
instead of 2.3 %. Here the stream has the stated count; everything else is `fig11_textgen`.
Expected shape: that of Figure 11, with the LoRA systems lower on Distinct, because an adapter is loaded every third
step instead of every thirtieth.

Cost at scale=laptop: about 1 minute on two cores, 6 GB. At scale=paper of Punica and the policy baselines expected to
take an H200 2 minutes per model:

    python -m experiments.ext_stated_lengths scale=paper model=llama2-7b draw=false \
        system.names=[punica,static_batching,continuous_batching]
    python -m experiments.ext_stated_lengths scale=paper model=llama2-13b draw=false \
        system.names=[punica,static_batching,continuous_batching]
"""

from experiments.fig11_textgen import Fig11
from experiments.harness import main


class StatedLengths(Fig11):
    """Figure 11 on the stated lengths, for Distinct and Identical."""

    name, figure, order, drawn_by = "ext_stated_lengths", "ext stated lengths", 270, ""


EXPERIMENT = StatedLengths()

if __name__ == "__main__":
    main(EXPERIMENT)
