"""The named sizes have as many parameters as their papers and libraries say; made on PyTorch's meta device, which
allocates nothing. That the Keras twin has the same shapes is `test_twins_forward`'s, at small sizes.
"""

import pytest
import torch

from torch_models import bert, gpt, resnet, vit

PUBLISHED = {
    # He et al. 2015, as torchvision counts them.
    resnet.resnet18: 11_689_512, resnet.resnet34: 21_797_672, resnet.resnet50: 25_557_032,
    resnet.resnet101: 44_549_160, resnet.resnet152: 60_192_808,
    # Zagoruyko and Komodakis 2016: 36.5M for 28-10 and 100 classes.
    resnet.wide_resnet: 36_536_884,
    # Dosovitskiy et al. 2020 and Touvron et al. 2020 (Ti, S), as timm counts them.
    vit.vit_tiny: 5_717_416, vit.vit_small: 22_050_664, vit.vit_base: 86_567_656, vit.vit_large: 304_326_632,
    vit.vit_huge: 632_045_800,
    # Devlin et al. 2018 and Turc et al. 2019: encoder and masked language model's head, without the pooler.
    bert.bert_mini: 11_201_594, bert.bert_small: 28_795_194, bert.bert_medium: 41_404_730,
    bert.bert_base: 109_514_298, bert.bert_large: 335_174_458,
    # Radford et al. 2019, as published weights have them.
    gpt.gpt2_small: 124_439_808, gpt.gpt2_medium: 354_823_168,
}


def count(build):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


@pytest.mark.parametrize("build", PUBLISHED, ids=lambda build: build.__name__)
def test_parameters_are_as_many_as_published(build):
    assert count(build) == PUBLISHED[build]


@pytest.mark.parametrize("build", PUBLISHED, ids=lambda build: build.__name__)
def test_docstrings_say_the_same(build):
    """Of BERT and GPT-2 with tied weights, which is what they are published with."""
    assert f"{PUBLISHED[build]:,}" in build.__doc__
