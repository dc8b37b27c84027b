"""The serving systems of Figures 11 and 12, and what they are compared on: one backbone, the same adapters, one stream.

======================  ==============  ====================================================  ======
name                    library         batches                                               LoRA
======================  ==============  ====================================================  ======
`punica`                ours            continuous, any mix of adapters                       SGMV
`punica_sharded`        ours            the same, adapters cut over the ranks of Figure 12    SGMV
`punica_last_admitted`  ours            the same, with the released index rule (D04): wrong   SGMV
`punica_static`         ours            static, 32 consecutive requests, any mix              SGMV
`continuous_batching`   ours            continuous, one adapter at a time (the policy of vLLM)  none
`static_batching`       ours            static, one adapter (FasterTransformer, DeepSpeed)    none
`hf_peft`               Hugging Face    static, one adapter                                   PEFT
`hf_peft_mixed`         Hugging Face    static, 32 consecutive requests, any mix              PEFT
======================  ==============  ====================================================  ======

The two policy baselines run on our engine with our kernels, and without LoRA, as in the paper: they isolate what the
batching policy costs. The Hugging Face systems are the real libraries, with the linear product of our layers.

On a GPU, engines run their steps as CUDA graphs, and all that a window needs are captured before it is timed; Hugging
Face launches its own, since PEFT's mixed batches cannot be captured (each layer sends lists of rows from the host).

A stream has tens of thousands of steps, so systems are timed on *windows* of it (`windows`): the engine, or the static
batch, is put into the state that it has there, with noise for keys and values, and goes on from there.

Requests that arrive by the clock (`open_loop`, `load_bench`, `load_readings`) are for engines of `loaded`: some of
these, and Punica with other rules of admission, fewer slots than adapters, or adapters in folders.

**To add a system**: a `ServingSystem` with `@SYSTEMS.register("name")` in a module imported here, its name in
`conf/figure/fig11_textgen.yaml`, and a test.
"""

from experiments.systems import engine_systems, hf_systems
from experiments.systems.bench import StreamBench, StreamConf
from experiments.systems.check import check_tokens
from experiments.systems.serving import SYSTEMS, Served, ServingSystem
from experiments.systems.stream import Job, paper_stream
from experiments.systems.weights import Limits
from experiments.systems.world import World
