"""The paper's request streams as files, and the score of another system's answers to them. No torch."""
