"""Patterns for torch 2.13; made by kwtrace, not to be edited."""

RULES = {
    'attention': '17335467e577a79eeb9423c6fe44691c79edeed519372fa1633f6cd3b9632903',
    'attention_grouped': 'd0bc14c49e41217107c9988ddc1c503c1b51294e267f2639b15e25ea56e7ba44',
    'mm_act': '6b47440ec1f688115cee6091e8c75b8c8ae45cf44e805cad33e6e88e6a41ce5c',
}
MANIFEST = '1dad25dde144afbd52b785adf2e2738710869bf7b580283b418bcb38a9127ad9'
