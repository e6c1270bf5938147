"""The public names, each from where it is defined: for type checkers, and for `__getattr__` of the package."""

from attnscope.choice import Choice as Choice
from attnscope.corpus import Corpus as Corpus
from attnscope.corpus.pairs import Pairs as Pairs
from attnscope.errors import AttnscopeError as AttnscopeError
from attnscope.models import load as load
from attnscope.questions.ablate import AblateOptions as AblateOptions
from attnscope.questions.arrays import record_from_arrays as record_from_arrays
from attnscope.questions.patch import PatchOptions as PatchOptions
from attnscope.questions.relations import RelationsOptions as RelationsOptions
from attnscope.questions.split import SplitOptions as SplitOptions
from attnscope.questions.weights import WeightsOptions as WeightsOptions
from attnscope.results.result import load_record as load_record
from attnscope.studies.ablate.save import prune as prune
from attnscope.studies.ablate.study import ablate as ablate
from attnscope.studies.atlas.options import AtlasOptions as AtlasOptions
from attnscope.studies.atlas.study import atlas as atlas
from attnscope.studies.batch.options import BatchOptions as BatchOptions
from attnscope.studies.batch.study import batch as batch
from attnscope.studies.compare.options import CompareOptions as CompareOptions
from attnscope.studies.compare.study import compare as compare
from attnscope.studies.compare.study import compare_models as compare_models
from attnscope.studies.compare.study import without_heads as without_heads
from attnscope.studies.compare.texts import compare_heads as compare_heads
from attnscope.studies.compare.texts import compare_texts as compare_texts
from attnscope.studies.cost import cost as cost
from attnscope.studies.heads.needles import retrieval_heads as retrieval_heads
from attnscope.studies.heads.options import (
    DescribeOptions as DescribeOptions,
)
from attnscope.studies.heads.options import (
    HeadsOptions as HeadsOptions,
)
from attnscope.studies.heads.options import (
    NeedleOptions as NeedleOptions,
)
from attnscope.studies.heads.study import heads as heads
from attnscope.studies.maps.derived import (
    relevance as relevance,
)
from attnscope.studies.maps.derived import (
    rollout as rollout,
)
from attnscope.studies.maps.page import page as page
from attnscope.studies.maps.study import (
    heatmap as heatmap,
)
from attnscope.studies.maps.study import (
    picture_heatmap as picture_heatmap,
)
from attnscope.studies.maps.study import (
    pooled_heatmap as pooled_heatmap,
)
from attnscope.studies.maps.study import (
    sound_heatmap as sound_heatmap,
)
from attnscope.studies.patch.study import patch as patch
from attnscope.studies.relations.study import relations as relations
from attnscope.studies.senses.study import picture_heads as picture_heads
from attnscope.studies.senses.study import sound_heads as sound_heads
from attnscope.studies.split import split as split
from attnscope.studies.trace import trace as trace
from attnscope.studies.training.options import TrainingOptions as TrainingOptions
from attnscope.studies.training.study import training as training
from attnscope.studies.weights import weights as weights
from attnscope.studies.why import why as why

__version__: str
