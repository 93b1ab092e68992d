from dataclasses import dataclass
from memlab.configs.shapes import GPTConfig
@dataclass(frozen=True)
class Mesh:
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    checkpointed: bool = True
    @property
    def gpus(self): return self.data*self.tensor*self.pipeline*self.context
    @property
    def micro_batches(self): return 1 if self.pipeline == 1 else 2*self.pipeline
    @property
    def sizes(self):
        sizes = dict(pipeline=self.pipeline, data=self.data, context=self.context, tensor=self.tensor)
        return {n: s for n, s in sizes.items() if s > 1 or n == "data"}
    def __str__(self): return f"data {self.data}, tensor {self.tensor}, pipeline {self.pipeline}, context {self.context}"
def require_llama(config, mesh, seq_len): pass
