"""Training of many models of one structure, of clients or of coalitions, as rows of one batched model. No module here
uses whether a row is a client's or a coalition's model.
"""
