"""Patterns for torch 2.15; made by kwtrace, not to be edited."""

RULES = {
    'attention': '8ce7d8f7f310e623ed4898bddc93639669a3db9ae9ea7e2523d71a7a9f609289',
    'attention_grouped': 'd487f3f718b040baa5d6bdf64f6f222cde5ac0a8497ae86a931dc7d5c2dbcf41',
    'mm_act': '6b47440ec1f688115cee6091e8c75b8c8ae45cf44e805cad33e6e88e6a41ce5c',
}
MANIFEST = '7c9080b609fec322299f7e352c31f4726afbd0ec2aa7b4353ca2fd86898955c1'
