"""Patterns for torch 2.13; made by kwtrace, not to be edited."""

RULES = {
    'attention': '1474908014ed7f610d589e3f3d241bf6abd6a07f7413eff37c29321d42caff90',
    'attention_grouped': 'c48421555e7de3d2a81eb7560c3aac82f88aed8e89b8b7f4d653fc5a47ed2332',
    'mm_act': '6b47440ec1f688115cee6091e8c75b8c8ae45cf44e805cad33e6e88e6a41ce5c',
}
MANIFEST = 'fae7fe172867620abce045079d378dda93c2ebb43673be83db63d7c7edc526cd'
