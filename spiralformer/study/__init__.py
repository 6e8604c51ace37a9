"""The paper's experiments as declared studies: many small runs, one table, computed verdicts.

spec     a study's file and a scale become rows: models, budgets, claims
lab      runs carried out in processes of their own, each at most once, in a shared cache
tune     the learning rate of each family, by a declared sweep
judge    matched means matched; the rule behind every verdict
figures  the study's figures
report   tables, JSON and the page
conduct  a study from beginning to end"""
