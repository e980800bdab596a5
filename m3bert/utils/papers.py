"""The identity of an objective, and the papers that it implements, as model cards cite them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """
    A paper.

    Args:
        title (`str`): Title.
        id (`str`): arXiv identifier, `YYMM.NNNNN`. For a paper elsewhere, `YY00`: only the year is read.
        authors (`tuple[str, ...]`): Names of the authors, as printed in the paper.
        url (`str`, *optional*): Where to find it. Default: its page on the Hub, by the arXiv identifier.
    """

    title: str
    id: str
    authors: tuple[str, ...]
    url: str = ""

    @property
    def link(self) -> str:
        """Address of the paper."""
        return self.url or f"https://huggingface.co/papers/{self.id}"

    @property
    def citation(self) -> str:
        """BibTeX entry of the paper."""
        key = f"{self.authors[0].split()[-1].lower()}20{self.id[:2]}"
        values = {
            "title": f"{{{self.title}}}",
            "author": " and ".join(self.authors),
            "year": f"20{self.id[:2]}",
            **({"url": self.url} if self.url else {"eprint": self.id, "archivePrefix": "arXiv"}),
        }
        lines = (f"  {name} = {{{value}}}" for name, value in values.items())
        return f"@misc{{{key},\n" + ",\n".join(lines) + "\n}"


@dataclass(frozen=True)
class Identity:
    """
    Description of an objective for training records and model cards.

    Args:
        name (`str`): Common name, such as `"SIA"`.
        equation (`str`): What the objective computes, with the equation of the paper.
        papers (`tuple[Paper, ...]`): Papers to cite.
        tags (`tuple[str, ...]`): Tags for the Hub.
        weight (`float`, *optional*, defaults to 1.0): Weight in the loss.
        parts (`tuple[Identity, ...]`, *optional*): Parts of a composition, with their weights; empty for a single
            objective.
    """

    name: str
    equation: str
    papers: tuple[Paper, ...]
    tags: tuple[str, ...]
    weight: float = 1.0
    parts: tuple[Identity, ...] = ()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


M3BERT = Paper(
    "m3BERT: A Modern, Multi-lingual, Matryoshka Bidirectional Encoder",
    "2605.19568",
    _names("Yaoxiang Wang, Simiao Zuo, Qingguo Hu, Yucheng Ding, Yeyun Gong, Jian Jiao, Jinsong Su"),
)
MRL = Paper(
    "Matryoshka Representation Learning",
    "2205.13147",
    _names(
        "Aditya Kusupati, Gantavya Bhatt, Aniket Rege, Matthew Wallingford, Aditya Sinha, Vivek Ramanujan, "
        "William Howard-Snyder, Kaifeng Chen, Sham Kakade, Prateek Jain, Ali Farhadi"
    ),
)
SIMCSE = Paper(
    "SimCSE: Simple Contrastive Learning of Sentence Embeddings",
    "2104.08821",
    ("Tianyu Gao", "Xingcheng Yao", "Danqi Chen"),
)
ESE = Paper(
    "ESE: Espresso Sentence Embeddings", "2402.14776", ("Xianming Li", "Zongxi Li", "Jing Li", "Haoran Xie", "Qing Li")
)
COSENT = Paper(
    "CoSENT: Consistent Sentence Embedding via Similarity Ranking",
    "2400",
    _names(
        "Xiang Huang, Hao Peng, Dongcheng Zou, Zhiwei Liu, Jianxin Li, Kay Liu, Jia Wu, Jianlin Su, Philip S. "
        "Yu"
    ),
    "https://doi.org/10.1109/TASLP.2024.3402087",
)  # fmt: skip
ANGLE = Paper(
    "AoE: Angle-optimized Embeddings for Semantic Textual Similarity", "2309.12871", ("Xianming Li", "Jing Li")
)
MARGIN_MSE = Paper(
    "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge Distillation",
    "2010.02666",
    _names("Sebastian Hofstätter, Sophia Althammer, Michael Schröder, Mete Sertkan, Allan Hanbury"),
)
TIGHTLY_COUPLED = Paper(
    "Distilling Dense Representations for Ranking using Tightly-Coupled Teachers",
    "2010.11386",
    ("Sheng-Chieh Lin", "Jheng-Hong Yang", "Jimmy Lin"),
)
STARBUCKS = Paper(
    "Starbucks: Improved Training for 2D Matryoshka Embeddings",
    "2410.13230",
    _names("Shengyao Zhuang, Shuai Wang, Fabio Zheng, Bevan Koopman, Guido Zuccon"),
)
MIPIC = Paper(
    "MIPIC: Matryoshka Representation Learning via Self-Distilled Intra-Relational and Progressive Information "
    "Chaining",
    "2604.24374",
    _names("Phung Gia Huy, Hai An Vu, Minh-Phuc Truong, Thang Duc Tran, Linh Ngo Van, Thanh Nguyen Hong, Trung Le"),
)
MIC = Paper(
    "MIC: Maximizing Informational Capacity in Adaptive Representations via Isotropic Subspace Alignment",
    "2605.29987",
    ("Nguyen Hong Dang", "Nhi Ngoc-Yen Nguyen", "Huy-Hieu Pham"),
)
IBKD = Paper(
    "Text Representation Distillation via Information Bottleneck Principle",
    "2311.05472",
    _names("Yanzhao Zhang, Dingkun Long, Zehan Li, Pengjun Xie"),
)
QAMA = Paper(
    "Quantization Aware Matryoshka Adaptation: Leveraging Matryoshka Learning, Quantization, and Bitwise Operations "
    "for Reduced Storage and Improved Retrieval Speed",
    "2500",
    ("Faizan Ahemad",),
    "https://github.com/faizanahemad/embedding-binary-quantisation",
)
CRD = Paper(
    "Contrastive Representation Distillation", "1910.10699", ("Yonglong Tian", "Dilip Krishnan", "Phillip Isola")
)
HPD = Paper(
    "Compressing Sentence Representation for Semantic Retrieval via Homomorphic Projective Distillation",
    "2203.07687",
    _names("Xuandong Zhao, Zhiguo Yu, Ming Wu, Lei Li"),
)
