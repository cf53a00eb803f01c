"""Patterns for torch 2.15; made by kwtrace, not to be edited."""

RULES = {
    'attention': '1474908014ed7f610d589e3f3d241bf6abd6a07f7413eff37c29321d42caff90',
    'attention_grouped': 'c48421555e7de3d2a81eb7560c3aac82f88aed8e89b8b7f4d653fc5a47ed2332',
    'mm_act': '6b47440ec1f688115cee6091e8c75b8c8ae45cf44e805cad33e6e88e6a41ce5c',
}
MANIFEST = '57226afbff416053a76d6e2f76f42ad4a0ab48a4f7b4e532db08444323f6bdf8'
