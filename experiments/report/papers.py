"""Claims of the papers, as data: how each is known, which stored figure answers it, and what differs.

CPR is Maeng et al., "CPR: Understanding and Improving Failure Tolerant Training for Deep Learning
Recommendation with Partial Recovery", MLSys 2021. Its full text was not at hand: its abstract was read, the
rest is recalled, so every claim says which of the two it is. What was only guessed is not here. Nor is what
the paper says of overheads: the emulated job's times were worked back from it, so that agreement shows
nothing. DES is Rong et al., arXiv 1909.04823; quoted is the abstract of its first version, and later ones
give other figures. MSTopK is Shi et al., MLSys 2021, arXiv 2010.10458, whose abstract was read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from experiments.report.results import FigureValue, Result, number

CPR: Final = "CPR (MLSys 2021)"
DES: Final = "DES (arXiv 1909.04823, first version)"
MSTOPK: Final = "MSTopK and HiTopKComm (MLSys 2021)"


class Known(Enum):
    """How a claim is known. An uncertain claim is never printed, so there is no member for it."""

    READ = "read in the paper's abstract"
    RECALLED = "recalled from the paper, not read again"
    RECALLED_ROUGHLY = "recalled from the paper; the digits may be off"


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """A claim of a paper and the figures that answer it.

    Attributes:
        experiment: whose stored result answers it; without that result the claim is left out.
        figures: of that result; none where its picture is the answer.
        subject: a few words.
        claim: the paper's, with its unit.
        known: how the claim is known.
        differs: what differs between the two measurements, and why.
        percent: whether the figures are shares that are shown in percent, as the paper's are.
        paper: that makes the claim.
    """

    experiment: str
    figures: Sequence[str] = ()
    subject: str
    claim: str
    known: Known
    differs: str
    percent: bool = False
    paper: str = CPR

    def answers(self, result: Result) -> list[tuple[str, str]]:
        """Each figure with its value, for reading.

        Raises:
            ValueError: the result lacks one of the figures.
        """
        return [(figure, self._shown(result.measured(figure))) for figure in self.figures]

    def _shown(self, measured: FigureValue) -> str:
        if self.percent and measured.value is not None:
            return f"{number(measured.value * 100, 3)} %"
        return str(measured)


_SYNTHETIC: Final = (
    "Ours is trained on synthetic Criteo-like data, in one process with eight logical nodes, over many "
    "seeds; the paper's on Criteo Kaggle and Terabyte"
)

CLAIMS: Final[Sequence[PaperClaim]] = [
    PaperClaim(
        experiment="overhead",
        figures=("auc_delta_mfu", "auc_delta_ssu"),
        subject="quality with priority saving, against no failure",
        claim="model quality on par with full recovery",
        known=Known.READ,
        differs=f"The abstract gives no number. {_SYNTHETIC}. Full recovery equals no failure here.",
    ),
    PaperClaim(
        experiment="pls_auc",
        figures=("pls_auc_correlation",),
        subject="correlation of PLS and loss of AUC",
        claim="0.8764",
        known=Known.RECALLED_ROUGHLY,
        differs=f"{_SYNTHETIC}. Which range of PLS the paper's runs cover is not known.",
    ),
    PaperClaim(
        experiment="pls_auc",
        figures=("slope_vanilla", "slope_scar", "slope_mfu", "slope_ssu", "slope_random"),
        subject="AUC lost per PLS",
        claim="gentler with MFU and SSU than with vanilla",
        known=Known.RECALLED,
        differs=f"{_SYNTHETIC}. Random rows are a control that the paper does not have.",
    ),
    PaperClaim(
        experiment="sensitivity",
        subject="several nodes lost at once, more failures",
        claim="a larger lost share of the embeddings hurts accuracy more; more failures raise every overhead",
        known=Known.RECALLED,
        differs=f"{_SYNTHETIC}.",
    ),
    PaperClaim(
        experiment="scaling",
        subject="overhead over the number of nodes",
        claim="full recovery's grows, CPR's stays nearly flat or falls",
        known=Known.RECALLED,
        differs=(
            "Ours goes to 10,000 nodes and is simulated as well. Loading and getting a new node cost both "
            "recoveries the same, grow with the number of failures, and dominate in the end."
        ),
    ),
    PaperClaim(
        experiment="recovery_soak",
        figures=("soak_auc_delta",),
        subject="partial recovery in a real run",
        claim="a production-scale run trains faster, without notable loss of accuracy",
        known=Known.READ,
        differs=(
            "Ours is half an hour on two nodes of one machine, with a failure every minute or so, real "
            "kills of workers and nodes among them, and with saves far more frequent than a production "
            "run's."
        ),
    ),
    PaperClaim(
        experiment="splitting",
        figures=(
            "bytes_saved_lr",
            "bytes_saved_fm",
            "bytes_saved_deepfm",
            "bytes_saved_lr_with_ids",
            "bytes_saved_fm_with_ids",
            "bytes_saved_deepfm_with_ids",
        ),
        subject="bytes that splitting saves",
        claim="72.26 % to 99.77 % by theory, over the types of models; up to 83 % measured",
        known=Known.READ,
        percent=True,
        paper=DES,
        differs=(
            "Ours are counted on the wire, on 4 workers and samples with 214 ids, as in MLPerf's data; with "
            "one id a feature less is saved, as the experiment's own figures say. By the paper's convention "
            "samples' ids are left out, being read where their rows live, while the keys that a parameter "
            "server sends are in. We do send ids: `_with_ids` counts them, and a linear part then costs "
            "more than it saves. Shapes and batches of the paper are not known."
        ),
    ),
    PaperClaim(
        experiment="splitting",
        figures=("best_throughput_ratio",),
        subject="throughput with split operators",
        claim="up to 4.5 times",
        known=Known.READ,
        paper=DES,
        differs=(
            "Ours is over TorchRec's plan, which sends pooled embeddings, and among processes that share "
            "two cores; the paper's is on a cluster, over systems that send weights."
        ),
    ),
    PaperClaim(
        experiment="communication",
        figures=("wide_1gbps_speedup",),
        subject="training step over slow links, with what is chosen",
        claim="25 to 40 % faster than the best existing systems",
        known=Known.READ,
        paper=MSTOPK,
        differs=(
            "Ours is a model of 52 million dense parameters among processes that share two cores, over DDP "
            "with dense gradients; the paper's are networks for images and text on 128 GPUs of 16 nodes in "
            "a public cloud."
        ),
    ),
]
