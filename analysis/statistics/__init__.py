"""Quantiles, resampling and tests over numbers alone.

References, by the numbers that the modules cite
------------------------------------------------
[1] Ibragimov, R. and Müller, U. K. (2010). t-statistic based correlation and heterogeneity robust inference.
[2] Holm, S. (1979). A simple sequentially rejective multiple test procedure.
[3] Berger, R. L. (1982). Multiparameter hypothesis testing and acceptance sampling.
[4] Lazarus, E., Lewis, D. J., Stock, J. H. and Watson, M. W. (2018). HAR inference: recommendations for practice.
    Journal of Business and Economic Statistics 36(4), 541-559: .4 n^(2/3) cosines.
[5] Satterthwaite, F. E. (1946). An approximate distribution of estimates of variance components.
[6] Finney, D. J. (1971). Probit Analysis, 3rd edition.
[7] Wilks, S. S. (1938). The large-sample distribution of the likelihood ratio for testing composite hypotheses.
[8] DerSimonian, R. and Laird, N. (1986). Meta-analysis in clinical trials.
[9] Bakbergenuly, I., Hoaglin, D. C. and Kulinskaya, E. (2022). On the Q statistic with constant weights for
    standardized mean difference.
[10] Cochran, W. G. (1954). The combination of estimates from different experiments.
[11] de la Peña, V. H. (1999). A general class of exponential inequalities for martingales and ratios.
[12] Ville, J. (1939). Étude critique de la notion de collectif.
[13] Robbins, H. (1970). Statistical methods related to the law of the iterated logarithm.
[14] Welch, B. L. (1947). The generalization of "Student's" problem when several different population variances are
    involved. Biometrika 34(1-2), 28-35.
[15] MacKinnon, J. G. and White, H. (1985). Some heteroskedasticity-consistent covariance matrix estimators with
    improved finite sample properties.
[16] Hyndman, R. J. and Fan, Y. (1996). Sample quantiles in statistical packages. The American Statistician 50(4).
"""
